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
from vllmx.sampling_params import SamplingParams


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(dim=-1, dtype=torch.float32)


def get_log_softmax(batch_invariant: bool) -> Callable[[Tensor], Tensor]:
    """Logits [n, vocab] to log-probabilities, float32; row by row if `batch_invariant`."""
    return row_by_row(_log_softmax, "logits") if batch_invariant else _log_softmax


def compute_topk_logprobs(
    values: Tensor, num_logprobs: int, chosen: Tensor, extra_ids: list[Tensor | None] | None = None
) -> LogprobsLists:
    """The chosen token's value and rank, then the num_logprobs largest values.

    A rank is the number of tokens at least as likely: the best has 1, two that tie for it have 2.

    values: float32 [n, vocab], log-probabilities or logits as the mode wants; chosen: int64 [n].
    extra_ids: for each row, the token ids asked for by name, which take the place of the largest.
    """
    picked = values.gather(1, chosen.unsqueeze(1))
    ranks = (values >= picked).sum(dim=1)
    ids, scores = chosen.unsqueeze(1), picked
    if num_logprobs > 0:
        top = values.topk(num_logprobs, dim=1)
        ids = torch.cat((ids, top.indices), dim=1)
        scores = torch.cat((scores, top.values), dim=1)
    if extra_ids is not None:
        ids, scores = _with_named_ids(values, ids, scores, extra_ids)
    return LogprobsLists(
        ids.to(torch.int32).cpu().numpy(),
        scores.cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
    )


def _with_named_ids(
    values: Tensor, ids: Tensor, scores: Tensor, extra_ids: list[Tensor | None]
) -> tuple[Tensor, Tensor]:
    width = max(ids.shape[1] - 1, max(len(e) for e in extra_ids if e is not None))
    missing = width + 1 - ids.shape[1]
    ids = torch.nn.functional.pad(ids, (0, missing))
    scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    for row, named in enumerate(extra_ids):
        if named is None:
            continue
        ids[row, 1 : 1 + len(named)] = named
        scores[row, 1 : 1 + len(named)] = values[row, named]
    return ids, scores


class LogprobTokenIdsState:
    """Token ids whose logprobs a request asked for by name."""

    def __init__(self, max_num_reqs: int, device: str) -> None:
        self.device = device
        self.active = np.zeros(max_num_reqs, dtype=np.bool_)
        self.token_ids: dict[int, Tensor] = {}

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's token ids."""
        self.token_ids.pop(row, None)
        self.active[row] = bool(params.logprob_token_ids)
        if params.logprob_token_ids:
            self.token_ids[row] = torch.tensor(params.logprob_token_ids, device=self.device)

    def gather(self, rows: np.ndarray) -> list[Tensor | None] | None:
        """For each of the rows its token ids or None; None if no row has any."""
        if not self.active[rows].any():
            return None
        return [self.token_ids.get(int(row)) for row in rows]
