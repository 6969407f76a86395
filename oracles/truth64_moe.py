# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in float64; see truth64_ops.py."""

from __future__ import annotations

import numpy as np

from oracles.truth64_ops import TRUTH, Outputs, gelu_and_mul, silu_and_mul, truth

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
def grouped_topk(
    gating_output: np.ndarray,
    topk: int,
    renormalize: bool,
    num_expert_group: int,
    topk_group: int,
    scoring_func: str,
    routed_scaling_factor: float,
    e_score_correction_bias: np.ndarray | None,
) -> Outputs:
    """ids: token by token, the best of the best groups; weights: their scores without the bias."""
    ids, weights = [], []
    for logits in gating_output:
        if scoring_func == "sigmoid":
            scores = 1.0 / (1.0 + np.exp(-logits))
        else:
            scores = np.exp(logits - logits.max())
            scores /= scores.sum()
        biased = scores if e_score_correction_bias is None else scores + e_score_correction_bias
        counted = 1 if e_score_correction_bias is None else 2
        size = len(scores) // num_expert_group
        worth = [
            np.sort(biased[group * size : (group + 1) * size])[-counted:].sum()
            for group in range(num_expert_group)
        ]
        groups = np.argsort(worth)[-topk_group:]
        allowed = [expert for expert in range(len(scores)) if expert // size in groups]
        best = sorted(allowed, key=lambda expert: -biased[expert])[:topk]
        share = scores[best] / (scores[best].sum() if renormalize else 1.0)
        ids.append(best)
        weights.append(share * routed_scaling_factor)
    return {"weights": np.array(weights), "ids": np.array(ids)}


def _activated(name: str, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    both = np.concatenate((gate, up))
    if name == "silu":
        return silu_and_mul(both)["out"]
    if name in ("gelu", "gelu_tanh"):
        return gelu_and_mul(both, "tanh" if name == "gelu_tanh" else "none")["out"]
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    return gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)


@truth
def fused_experts(
    hidden_states: np.ndarray,
    w13_weight: np.ndarray,
    w2_weight: np.ndarray,
    topk_weights: np.ndarray,
    topk_ids: np.ndarray,
    activation: str = "silu",
    w13_bias: np.ndarray | None = None,
    w2_bias: np.ndarray | None = None,
) -> Outputs:
    """out: token by token, each expert's answer by its weight."""
    out = np.zeros_like(hidden_states)
    for token, experts in enumerate(topk_ids):
        for place, expert in enumerate(experts):
            first = w13_weight[expert] @ hidden_states[token]
            if w13_bias is not None:
                first = first + w13_bias[expert]
            found = w2_weight[expert] @ _activated(activation, *np.split(first, 2))
            if w2_bias is not None:
                found = found + w2_bias[expert]
            out[token] += topk_weights[token, place] * found
    return {"out": out}
