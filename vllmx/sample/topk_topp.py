# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/ops/topk_topp_sampler.py @ v0.25.0
"""Keeping the likeliest tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set to -inf, in place, all but the top_k likeliest, then all outside the top_p mass.

    logits: float32 [n, vocab]; top_k: int64 [n], vocab where a row keeps all; top_p: float32 [n].
    Tokens that tie with the last one kept by top_k stay. The likeliest token always stays.
    """
    if top_k is not None:
        limits = top_k[top_k < logits.shape[-1]]
        if len(limits):
            largest = int(limits.max())
            kept = logits.topk(largest, dim=-1).values
            index = (top_k.clamp(max=largest) - 1).unsqueeze(1)
            threshold = kept.gather(1, index)
            threshold[top_k >= logits.shape[-1]] = float("-inf")
            logits.masked_fill_(logits < threshold, float("-inf"))
    if top_p is not None:
        _apply_top_p(logits, top_p)
    return logits


def _apply_top_p(logits: Tensor, top_p: Tensor) -> None:
    rows = (top_p < 1.0).nonzero().flatten()
    if not len(rows):
        return
    ascending, order = logits[rows].sort(dim=-1)
    below = ascending.softmax(dim=-1).cumsum(dim=-1)
    drop = below <= 1.0 - top_p[rows].unsqueeze(1)
    drop[:, -1] = False
    ascending.masked_fill_(drop, float("-inf"))
    logits[rows] = torch.empty_like(ascending).scatter_(1, order, ascending)
