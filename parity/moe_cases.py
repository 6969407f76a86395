# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of mixtures of experts.

Scores of experts are a step apart that every dtype holds, so that the choice is never a tie. The
step differs from row to row, so that a row is told from another. Some
experts get no token, some many; one token, and more tokens than experts.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
STEP = 0.25


def _scores(m: Maker, tokens: int, experts: int) -> np.ndarray:
    rows = [
        (m.order(f"row{token}", experts) - experts // 2) * STEP / (1 << token % 3)
        for token in range(tokens)
    ]
    return np.stack(rows)


def _route(m: Maker, tokens: int, experts: int, topk: int, renormalize: bool) -> Arguments:
    scores = m.float(_scores(m, tokens, experts))
    return {"gating_output": scores, "topk": topk, "renormalize": renormalize}


@CASES.add("topk_softmax", "renormalized", cells=("2 of 8", "renormalized"))
def _(m: Maker) -> Arguments:
    return _route(m, 17, 8, 2, True)


@CASES.add("topk_softmax", "plain", cells=("4 of 60", "probabilities among all"))
def _(m: Maker) -> Arguments:
    return _route(m, 33, 60, 4, False)


@CASES.add("topk_softmax", "one_row", cells=("10 of 64", "one token"))
def _(m: Maker) -> Arguments:
    return _route(m, 1, 64, 10, True)


def _grouped(
    m: Maker, tokens: int, experts: int, topk: int, scoring: str, bias: bool = False, **how: object
) -> Arguments:
    """Defaults are upstream's: one group, nothing renormalised or scaled."""
    scores = _scores(m, tokens, experts)
    if scoring == "softmax":
        scores = scores / 4
    correction = m.order("bias", experts) / experts - 0.5 if bias else None
    return {
        "gating_output": m.float(scores),
        "topk": topk,
        "renormalize": False,
        "num_expert_group": 1,
        "topk_group": 1,
        "scoring_func": scoring,
        "routed_scaling_factor": 1.0,
        "e_score_correction_bias": None if correction is None else m.float(correction, "f32"),
        **how,
    }


@CASES.add("grouped_topk", "sigmoid", cells=("4 of 16", "sigmoid", "renormalized"))
def _(m: Maker) -> Arguments:
    return _grouped(m, 17, 16, 4, "sigmoid", renormalize=True)


@CASES.add("grouped_topk", "biased", cells=("4 of 16", "sigmoid", "bias", "scaled"))
def _(m: Maker) -> Arguments:
    scale = {"renormalize": True, "routed_scaling_factor": 2.5}
    return _grouped(m, 33, 16, 4, "sigmoid", True, **scale)


@CASES.add("grouped_topk", "groups", cells=("4 of 32", "softmax", "2 of 4 groups"))
def _(m: Maker) -> Arguments:
    return _grouped(m, 40, 32, 4, "softmax", num_expert_group=4, topk_group=2)


@CASES.add("grouped_topk", "biased_groups", cells=("6 of 32", "sigmoid", "bias", "3 of 8 groups"))
def _(m: Maker) -> Arguments:
    how = {"num_expert_group": 8, "topk_group": 3, "routed_scaling_factor": 0.5}
    return _grouped(m, 40, 32, 6, "sigmoid", True, **how)


@CASES.add("grouped_topk", "one_row", cells=("2 of 8", "softmax", "bias", "one token"))
def _(m: Maker) -> Arguments:
    return _grouped(m, 1, 8, 2, "softmax", True, renormalize=True)


def _experts(
    m: Maker, tokens: int, experts: int, topk: int, few: bool = False, crowded: bool = False
) -> Arguments:
    hidden, inner = 64, 32
    scores = _scores(m, tokens, experts)
    if few:
        scores[:, experts // 2 :] -= 100.0  # nobody goes there
    if crowded:
        scores[:, 3] += 100.0  # everybody goes there
    ids = np.argsort(-scores, axis=1, kind="stable")[:, :topk]
    weights = m.uniform("weights", tokens, topk)
    w13 = m.normal("w13", experts, 2 * inner, hidden, std=2.0 * hidden**-0.5)
    return {
        "hidden_states": m.float(m.normal("x", tokens, hidden)),
        "w13_weight": m.float(w13),
        "w2_weight": m.float(m.normal("w2", experts, hidden, inner, std=inner**-0.5)),
        "topk_weights": m.float(weights / weights.sum(axis=1, keepdims=True), "f32"),
        "topk_ids": m.ints(ids, "i32"),
    }


@CASES.add("fused_experts", "plain", cells=("2 of 8", "17 tokens"))
def _(m: Maker) -> Arguments:
    return _experts(m, 17, 8, 2)


@CASES.add("fused_experts", "idle", cells=("experts without a token", "3 of 8"))
def _(m: Maker) -> Arguments:
    return _experts(m, 40, 8, 3, few=True)


@CASES.add("fused_experts", "crowded", cells=("one expert gets every token", "2 of 8"))
def _(m: Maker) -> Arguments:
    return _experts(m, 40, 8, 2, crowded=True)


@CASES.add("fused_experts", "one_row", cells=("one token", "4 of 4"))
def _(m: Maker) -> Arguments:
    return _experts(m, 1, 4, 4)


@CASES.add("fused_experts", "gelu", cells=("2 of 8", "gelu"))
def _(m: Maker) -> Arguments:
    return {**_experts(m, 17, 8, 2), "activation": "gelu"}


@CASES.add("fused_experts", "gelu_tanh", cells=("2 of 8", "gelu by tanh"))
def _(m: Maker) -> Arguments:
    return {**_experts(m, 17, 8, 2), "activation": "gelu_tanh"}


@CASES.add("fused_experts", "clamped", cells=("2 of 8", "clamped swiglu", "biases"))
def _(m: Maker) -> Arguments:
    arguments = _experts(m, 33, 8, 2)
    hidden, inner = 64, 32
    return {
        **arguments,
        "activation": "swigluoai_uninterleave",
        "w13_bias": m.float(m.normal("b13", 8, 2 * inner, std=4.0)),  # some beyond the clamp
        "w2_bias": m.float(m.normal("b2", 8, hidden)),
    }
