# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/min_p.py @ v0.25.0
"""Dropping tokens that are unlikely beside the likeliest."""

from torch import Tensor


def apply_min_p(logits: Tensor, min_p: Tensor) -> None:
    """Set to -inf, in place, tokens less likely than min_p times the likeliest.

    logits: float32 [n, vocab]; min_p: float32 [n], 0 for a row without it.
    """
    threshold = logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1)
    logits.masked_fill_(logits < threshold, float("-inf"))
