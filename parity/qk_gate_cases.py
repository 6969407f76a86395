# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of queries, their gates and keys that are normed and rotated in one.

Gates are much larger than queries, so that one which is taken for the other, or counted in a norm,
shows. Norms have weights of their own, and tables angles that no two positions share.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
OP = "fused_qk_rmsnorm_rope_gate"


def _given(
    m: Maker,
    positions: list[int],
    heads: tuple[int, int],
    head_size: int,
    rotary_dim: int,
    scale: np.ndarray | float = 1.0,
    epsilon: float = 1e-6,
    position_dtype: str = "i64",
) -> Arguments:
    """scale: of heads, all or [tokens, heads, head_size] of queries and keys."""
    count, (query_heads, kv_heads) = len(positions), heads
    drawn = m.normal("qk", count, query_heads + kv_heads, head_size, std=2.0) * scale
    gate = m.normal("gate", count, query_heads, head_size, std=20.0)
    q_gate = np.concatenate([drawn[:, :query_heads], gate], axis=2)
    t = m.uniform("angle", max(positions) + 2, rotary_dim // 2) * 2.0 - 1.0
    table = np.concatenate([(1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)], 1)
    # A checkpoint keeps a weight less 1: what is left of it in bfloat16 adds up exactly.
    kept = m.float(m.normal("weights", 2, head_size, std=0.3), "bf16").values()
    return {
        "q_gate": m.float(q_gate.reshape(count, -1)),
        "k": m.float(drawn[:, query_heads:].reshape(count, -1)),
        "q_weight": m.float(1.0 + kept[0], "f32"),
        "k_weight": m.float(1.0 + kept[1], "f32"),
        "cos_sin_cache": m.float(table, "f32"),
        "positions": m.ints(positions, position_dtype),
        "epsilon": epsilon,
    }


@CASES.add(OP, "plain", cells=("whole heads", "GQA 3:1", "sliced"), strided=("q_gate", "k"))
def _(m: Maker) -> Arguments:
    return _given(m, list(range(250, 257)), (3, 1), 64, 64)


@CASES.add(OP, "partial", cells=("a quarter of a head", "GQA 2:1", "positions fall"))
def _(m: Maker) -> Arguments:
    return _given(m, [4095, 3, 3, 0, 17, 2049], (4, 2), 64, 16)


@CASES.add(OP, "one_token", cells=("rows=1", "head_size=256", "GQA 4:1"))
def _(m: Maker) -> Arguments:
    return _given(m, [1023], (8, 2), 256, 64)


@CASES.add(OP, "odd_heads", cells=("head_size=80", "20 rotated", "no groups", "int32 positions"))
def _(m: Maker) -> Arguments:
    return _given(m, [9, 8, 7, 0, 1], (3, 3), 80, 20, position_dtype="i32")


@CASES.add(OP, "scales", cells=("variance=epsilon", "heads of unlike scale", "epsilon=1e-5"))
def _(m: Maker) -> Arguments:
    scale = np.array([1e-3, 0.1, 1.0, 8.0, 64.0, 3.0]).reshape(1, 6, 1)
    return _given(m, [5, 0, 77, 31, 2, 2], (4, 2), 32, 8, scale=scale, epsilon=1e-5)


@CASES.add(OP, "outliers", cells=("outliers where nothing is rotated",))
def _(m: Maker) -> Arguments:
    scale = np.ones(64)
    scale[-3:] = 20.0
    return _given(m, [12, 40, 41, 3, 600], (2, 1), 64, 32, scale=scale)
