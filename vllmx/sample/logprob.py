# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/logprob.py @ v0.25.0
"""Log-probabilities of sampled and of the likeliest tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import LogprobsLists
from vllmx.ir.row_by_row import row_by_row
from vllmx.sample.packed_rows import Packed, PackedRows
from vllmx.sampling_params import SamplingParams

TokenValues = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [n, vocab] and token ids int64 [n, k] to their values float32 [n, k] and the rank of each
row's first, int [n]."""


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def get_log_softmax(batch_invariant: bool) -> Callable[[Tensor], Tensor]:
    """Logits [n, vocab] to log-probabilities, float32; row by row if `batch_invariant`."""
    return row_by_row(_log_softmax, "logits") if batch_invariant else _log_softmax


def token_logits(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The logits themselves, and the rank; see TokenValues.

    A rank is the number of tokens at least as likely: the best has 1, two that tie for it have 2.
    """
    picked = logits.gather(1, token_ids).float()
    ranks = (logits >= logits.gather(1, token_ids[:, :1])).sum(dim=1)
    return picked, ranks


def token_logprobs(log_softmax: Callable[[Tensor], Tensor]) -> TokenValues:
    """Log-probabilities by `log_softmax`, and the rank among them."""

    def values(logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        return token_logits(log_softmax(logits), token_ids)

    return values


def compute_topk_logprobs(
    logits: Tensor,
    num_logprobs: int,
    chosen: Tensor,
    token_values: TokenValues,
    named: Packed | None = None,
) -> LogprobsLists:
    """The chosen token's value and rank, then the num_logprobs largest values.

    logits: float [n, vocab]; chosen: int64 [n]. named: token ids asked for by name; in the rows
    that have some they take the place of the likeliest, and what is left over is -inf.
    """
    ids = chosen.unsqueeze(1)
    if num_logprobs > 0:
        ids = torch.cat((ids, logits.topk(num_logprobs, dim=1).indices), dim=1)
    unused: Tensor | None = None
    if named is not None:
        ids, unused = _with_named_ids(ids, named)
    scores, ranks = token_values(logits, ids)
    if unused is not None:
        scores = scores.masked_fill(unused, float("-inf"))
        ids = ids.masked_fill(unused, 0)
    return LogprobsLists(
        ids.to(torch.int32).cpu().numpy(),
        scores.cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
    )


def _with_named_ids(ids: Tensor, named: Packed) -> tuple[Tensor, Tensor]:
    """The ids with the named ones put in, and which places of the wider table mean nothing."""
    likeliest = ids.shape[1]
    width = max(likeliest, named.width + 1)
    ids = torch.nn.functional.pad(ids, (0, width - likeliest))
    unused = torch.zeros_like(ids, dtype=torch.bool)
    unused[:, likeliest:] = True
    unused[named.places, 1:] = True
    where = (named.places, named.columns + 1)
    ids[where] = named.values
    unused[where] = False
    return ids, unused


class LogprobTokenIdsState:
    """Token ids whose logprobs a request asked for by name."""

    def __init__(self, max_num_reqs: int, device: str) -> None:
        self.token_ids = PackedRows(max_num_reqs, device)

    @property
    def active(self) -> np.ndarray:
        """Whether a row has any, bool [max_num_reqs]."""
        return self.token_ids.active

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's token ids."""
        token_ids = params.logprob_token_ids
        self.token_ids.set(row, np.array(token_ids, dtype=np.int64) if token_ids else None)

    def gather(self, rows: np.ndarray) -> Packed | None:
        """The token ids of a batch of rows; None if no row has any."""
        return self.token_ids.pack(rows)
