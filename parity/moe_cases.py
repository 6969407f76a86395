# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of mixtures of experts.

Scores of experts are a step apart that every dtype holds, so that the choice is never a tie. Some
experts get no token, some many; one token, and more tokens than experts.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
STEP = 0.25


def _scores(m: Maker, tokens: int, experts: int) -> np.ndarray:
    rows = [m.order(f"row{token}", experts) for token in range(tokens)]
    return (np.stack(rows) - experts // 2) * STEP


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


def _experts(m: Maker, tokens: int, experts: int, topk: int, few: bool = False) -> Arguments:
    hidden, inner = 64, 32
    scores = _scores(m, tokens, experts)
    if few:
        scores[:, experts // 2 :] -= 100.0  # nobody goes there
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


@CASES.add("fused_experts", "one_row", cells=("one token", "4 of 4"))
def _(m: Maker) -> Arguments:
    return _experts(m, 1, 4, 4)
