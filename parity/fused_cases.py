# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of linear layers joined with the norm before them, or the residual after.

Sizes are such that a provider has to cut: outputs and inputs that fill no tile, more inputs than a
tile holds, more rows than a launch takes, one row. The squares that a norm is given are those of
the rows as they are, in one part or in several of unlike size.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
SCALES = np.array([[1e-3], [0.1], [1.0], [0.0], [8.0], [64.0], [3.0]])
"""Of seven rows; the first has a variance of about epsilon."""


def _normal(m: Maker, name: str, *shape: int, std: float = 1.0) -> np.ndarray:
    """As in a bfloat16 checkpoint: a provider that packs weights to half precision is exact."""
    return m.float(m.normal(name, *shape, std=std), "bf16").values()


# ---------------------------------------------------------------------- product and residual


def _add(m: Maker, x: np.ndarray, residual: np.ndarray) -> Arguments:
    fan_in = x.shape[1]
    return {
        "x": m.float(x),
        "residual": m.float(residual),
        "weight": m.float(_normal(m, "weight", residual.shape[1], fan_in, std=fan_in**-0.5)),
    }


def _drawn_add(m: Maker, rows: int, fan_in: int, fan_out: int) -> Arguments:
    residual = m.normal("residual", rows, fan_out, std=2.0)
    return _add(m, m.normal("x", rows, fan_in), residual)


@CASES.add("linear_add", "plain", cells=("rows=24", "K=256"), strided=("x", "residual"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 24, 256, 96)


@CASES.add("linear_add", "one_row", cells=("rows=1", "N=2309", "K=1100"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 1, 1100, 2309)


@CASES.add("linear_add", "one_row_narrow", cells=("rows=1", "N=131", "K=577"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 1, 577, 131)


@CASES.add("linear_add", "one_row_split", cells=("rows=1", "N=131", "K=4500"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 1, 4500, 131)


@CASES.add("linear_add", "odd", cells=("rows=17", "N=131", "K=191"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 17, 191, 131)


@CASES.add("linear_add", "split", cells=("K=1088, in three tiles",))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 24, 1088, 96)


@CASES.add("linear_add", "wide", cells=("N=2050", "K=320"))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 3, 320, 2050)


@CASES.add("linear_add", "many_rows", cells=("rows=33",))
def _(m: Maker) -> Arguments:
    return _drawn_add(m, 33, 96, 72)


@CASES.add("linear_add", "last_k", cells=("most weight in the last element and tile of K",))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 24, 576)
    x[:, -1] *= 30.0
    x[:, -32:] *= 4.0
    return _add(m, x, m.normal("residual", 24, 96))


@CASES.add("linear_add", "outliers", cells=("residual outliers in the last columns",))
def _(m: Maker) -> Arguments:
    residual = m.normal("residual", 8, 300)
    residual[:, -3:] *= 40.0
    return _add(m, m.normal("x", 8, 128), residual)


@CASES.add("linear_add", "scales", cells=("zero row", "rows of unlike scale"))
def _(m: Maker) -> Arguments:
    return _add(m, m.normal("x", 7, 257) * SCALES, m.normal("residual", 7, 320) * SCALES)


# -------------------------------------------------------------------------- norm and product


def _norm(
    m: Maker,
    x: np.ndarray,
    fan_out: int,
    parts: int = 1,
    epsilon: float = 1e-6,
    gain: float = 1.0,
) -> Arguments:
    fan_in = x.shape[1]
    given = m.float(x)
    # Parts of unlike size: a provider may take them for nothing but summands.
    pieces = np.array_split(given.values() ** 2, parts, axis=1)
    squares = np.stack([piece.sum(axis=1) for piece in pieces], axis=1)
    return {
        "x": given,
        "squares": m.float(squares, "f32"),
        "norm_weight": m.float(m.normal("norm_weight", fan_in, std=0.2, mean=1.0)),
        "epsilon": epsilon,
        "weight": m.float(_normal(m, "weight", fan_out, fan_in, std=gain * fan_in**-0.5)),
    }


def _norm_cases(op: str, halves: int) -> None:
    """halves: weights of an output, two where one of them is a gate."""

    @CASES.add(op, "plain", cells=("rows=24", "K=256", "16 parts"), strided=("x",))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 24, 256), 96 * halves, parts=16)

    @CASES.add(op, "one_row", cells=("rows=1", "N=2309", "K=1100", "18 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 1, 1100), 2309 * halves, parts=18)

    @CASES.add(op, "one_row_narrow", cells=("rows=1", "N=131", "K=577", "7 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 1, 577, std=0.3), 131 * halves, parts=7)

    @CASES.add(op, "one_row_split", cells=("rows=1", "N=131", "K=4500"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 1, 4500, std=3.0), 131 * halves)

    @CASES.add(op, "odd", cells=("rows=17", "N=131", "K=191", "3 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 17, 191, std=2.0), 131 * halves, parts=3)

    @CASES.add(op, "split", cells=("K=1088, in three tiles", "5 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 24, 1088), 96 * halves, parts=5)

    @CASES.add(op, "wide", cells=("N=2050", "K=320"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 3, 320), 2050 * halves)

    @CASES.add(op, "many_rows", cells=("rows=33", "2 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 33, 96, std=2.0), 72 * halves, parts=2)

    @CASES.add(op, "tinyvar", cells=("variance=epsilon", "4 parts"))
    def _(m: Maker) -> Arguments:
        return _norm(m, m.normal("x", 8, 384, std=1e-3), 300 * halves, parts=4)

    @CASES.add(op, "scales", cells=("zero row", "rows of unlike scale", "epsilon=1e-5"))
    def _(m: Maker) -> Arguments:
        x = m.normal("x", 7, 257) * SCALES
        return _norm(m, x, 320 * halves, parts=2, epsilon=1e-5)

    @CASES.add(op, "outliers", cells=("outliers in the last columns", "6 parts"))
    def _(m: Maker) -> Arguments:
        x = m.normal("x", 8, 576, std=0.5)
        x[:, -3:] = m.normal("tail", 8, 3, std=20.0)
        return _norm(m, x, 300 * halves, parts=6)

    @CASES.add(op, "f32_weight", cells=("norm weight wider than x",))
    def _(m: Maker) -> Arguments:
        inputs = _norm(m, m.normal("x", 8, 384, std=3.0), 300 * halves)
        inputs["norm_weight"] = m.float(m.normal("wide", 384, std=0.3, mean=1.0), "f32")
        return inputs


_norm_cases("rms_norm_linear", 1)
_norm_cases("rms_norm_gated_linear", 2)


@CASES.add("rms_norm_gated_linear", "wide_gates", cells=("gates beyond 7",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 8, 256), 300 * 2, gain=6.0)
