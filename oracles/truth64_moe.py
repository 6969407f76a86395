# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in float64; see truth64_ops.py."""

from __future__ import annotations

import numpy as np

from oracles.truth64_ops import TRUTH, Outputs, silu_and_mul, truth

__all__ = ["TRUTH"]


@truth
def topk_softmax(gating_output: np.ndarray, topk: int, renormalize: bool) -> Outputs:
    """ids: the largest scores, largest first; weights: their softmax, among all or among them."""
    ids = np.argsort(-gating_output, axis=1, kind="stable")[:, :topk]
    shares = np.exp(gating_output - gating_output.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    weights = np.take_along_axis(shares, ids, axis=1)
    if renormalize:
        weights = weights / weights.sum(axis=1, keepdims=True)
    return {"weights": weights, "ids": ids}


@truth
def fused_experts(
    hidden_states: np.ndarray,
    w13_weight: np.ndarray,
    w2_weight: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
) -> Outputs:
    """out: token by token, each expert's answer by its weight."""
    out = np.zeros_like(hidden_states)
    for token, experts in enumerate(topk_ids):
        for place, expert in enumerate(experts):
            inner = silu_and_mul(w13_weight[expert] @ hidden_states[token])["out"]
            out[token] += topk_weights[token, place] * (w2_weight[expert] @ inner)
    return {"out": out}
