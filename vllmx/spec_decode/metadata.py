# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/spec_decode/metadata.py, vllm/v1/worker/gpu/input_batch.py @ v0.25.0
"""Where the drafts of a batch lie, and which rows of logits judge them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.worker.buffer_utils import to_device

PLACEHOLDER_TOKEN_ID = -1
"""Stands where a table has no token. As a draft it is one that is always rejected."""


@dataclass(frozen=True)
class SpecDecodeMetadata:
    """A request has a row of logits for each of its drafts, one after the other, then one for the
    bonus token that follows if all of them are accepted.

    num_draft_tokens: int64 [batch], on the host, as are requests and local_pos: int64 [num_logits],
    the request of each row of logits, and how many of its drafts come before. On the device, int64:
    draft_token_ids [batch, max_spec_len], filled up with PLACEHOLDER_TOKEN_ID; first_logits_indices
    and bonus_logits_indices [batch], a request's first and last row of logits.
    """

    draft_token_ids: Tensor
    num_draft_tokens: np.ndarray
    requests: np.ndarray
    local_pos: np.ndarray
    first_logits_indices: Tensor
    bonus_logits_indices: Tensor

    @classmethod
    def make(cls, draft_token_ids: Tensor, num_draft_tokens: np.ndarray) -> SpecDecodeMetadata:
        """draft_token_ids: int [num_tokens], of all requests one after the other; num_draft_tokens:
        int [batch], how many each has.
        """
        counts = num_draft_tokens.astype(np.int64)
        requests = np.repeat(np.arange(len(counts)), counts + 1)
        ends = np.cumsum(counts + 1)
        first = ends - counts - 1
        local_pos = np.arange(len(requests)) - first[requests]
        device = str(draft_token_ids.device)
        width = int(counts.max(initial=0))
        table = torch.full(
            (len(counts), width), PLACEHOLDER_TOKEN_ID, dtype=torch.int64, device=device
        )
        has_draft = np.arange(width) < counts[:, None]
        table[to_device(has_draft, device)] = draft_token_ids.long()
        return cls(
            table,
            counts,
            requests,
            local_pos,
            to_device(first, device),
            to_device(ends - 1, device),
        )

    @property
    def max_spec_len(self) -> int:
        """Drafts of the request that has most."""
        return self.draft_token_ids.shape[1]

    def drafts_before(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """For rows `places` [m] of the logits: the drafts of their requests, int64
        [m, max_spec_len], and which of them come before the row, bool of that shape."""
        device = str(self.draft_token_ids.device)
        drafts = self.draft_token_ids[to_device(self.requests[places], device)]
        before = np.arange(self.max_spec_len) < self.local_pos[places][:, None]
        return drafts, to_device(before, device)
