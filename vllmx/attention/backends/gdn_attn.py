# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/gdn_attn.py @ v0.25.0
"""What a gated delta net needs to know of a batch. The computation is the layer's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class GDNAttentionMetadata:
    """A batch whose decodes, requests with one new token, come before its prefills.

    query_start_loc: int32 [num_reqs + 1]; state_indices: int32 [num_reqs], the block of the states
    that a request reads and writes; has_initial_state: bool [num_reqs], false for a request with
    no computed token, whose states read as zeros whatever the block holds. Requests that fill up a
    CUDA graph's batch have no initial state and write to block 0, which is nobody's.
    prefill_query_start_loc: int32 [num_prefills + 1], counted from the first prefill's token.
    fresh_decode_indices: blocks of the decodes without a state, for the layer to clear; None where
    there are none.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    has_initial_state: Tensor
    query_start_loc: Tensor
    state_indices: Tensor
    prefill_query_start_loc: Tensor
    fresh_decode_indices: Tensor | None


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Tells decodes from prefills, and which requests have a state."""

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        """Metadata of the batch; requests with one new token must come first in it."""
        starts = common.query_start_loc_np
        lengths = starts[1:] - starts[:-1]
        num_decodes = int((lengths == 1).sum())
        assert (lengths[:num_decodes] == 1).all(), "requests with one new token must come first"
        state_indices = common.block_table_tensor[:, 0]
        fresh = np.flatnonzero(common.seq_lens_np[:num_decodes] == 1)
        fresh_indices = None
        if len(fresh):
            fresh_indices = state_indices.index_select(0, self._to_device(fresh))
        has_state = common.has_initial_state
        if has_state is None:
            has_state = self._to_device(common.seq_lens_np > lengths)
        return GDNAttentionMetadata(
            num_prefills=len(lengths) - num_decodes,
            num_prefill_tokens=int(starts[-1]) - num_decodes,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            has_initial_state=has_state,
            query_start_loc=common.query_start_loc,
            state_indices=state_indices,
            prefill_query_start_loc=common.query_start_loc[num_decodes:] - num_decodes,
            fresh_decode_indices=fresh_indices,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)
