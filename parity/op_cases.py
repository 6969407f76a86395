# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of norms, activations, rotation and linear layers.

Beside ordinary numbers each op gets the regimes in which a usual fault shows: a variance as small
as epsilon, outliers in the last columns, halves to round, gates far below zero, positions that
bfloat16 or float16 can't hold, weight in the last tile, rows of one batch row and of many.
"""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()


# ------------------------------------------------------------------------------------- norms


def _norm(m: Maker, x: np.ndarray, epsilon: float = 1e-6) -> Arguments:
    weight = m.normal("weight", x.shape[-1], std=0.2, mean=1.0)
    return {
        "x": m.float(x),
        "weight": m.float(weight),
        "epsilon": epsilon,
        "variance_size": None,
    }


@CASES.add("rms_norm", "plain", cells=("rows=8",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 8, 512))


@CASES.add("rms_norm", "tinyvar", cells=("variance=epsilon",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 8, 512, std=1e-3))


@CASES.add("rms_norm", "offset_outlier", cells=("mean>0", "outliers in the last columns"))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 8, 512, std=0.5, mean=0.5)
    x[:, -3:] = m.normal("tail", 8, 3, std=20.0)
    return _norm(m, x)


@CASES.add("rms_norm", "scales", cells=("zero row", "hidden=577", "rows of unlike scale"))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 7, 577) * np.array([[1e-3], [0.1], [1.0], [0.0], [8.0], [64.0], [3.0]])
    return _norm(m, x, epsilon=1e-5)


@CASES.add("rms_norm", "one_row", cells=("rows=1",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 1, 2304))


@CASES.add("rms_norm", "many_rows", cells=("rows=67", "strided"), strided=("x",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 67, 48, std=2.0))


@CASES.add("rms_norm", "heads", cells=("three dimensions",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 9, 4, 128))


@CASES.add("rms_norm", "f32_weight", cells=("weight wider than x",))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 8, 512, std=3.0)
    weight = m.float(m.normal("weight", 512, std=0.3, mean=1.0), "f32")
    return {"x": m.float(x), "weight": weight, "epsilon": 1e-6, "variance_size": None}


@CASES.add("rms_norm", "no_weight_part", cells=("no weight", "variance of a part"))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 8, 512) * np.where(np.arange(512) < 384, 1.0, 4.0)
    return {"x": m.float(x), "weight": None, "epsilon": 1e-6, "variance_size": 384}


def _add_norm(m: Maker, x: np.ndarray, residual: np.ndarray, epsilon: float = 1e-6) -> Arguments:
    inputs = _norm(m, x, epsilon)
    return {"x": inputs.pop("x"), "x_residual": m.float(residual), **inputs}


@CASES.add("fused_add_rms_norm", "plain", cells=("rows=8",))
def _(m: Maker) -> Arguments:
    return _add_norm(m, m.normal("x", 8, 384), m.normal("residual", 8, 384, std=3.0))


@CASES.add("fused_add_rms_norm", "tinyvar", cells=("variance=epsilon",))
def _(m: Maker) -> Arguments:
    x, residual = m.normal("x", 8, 384, std=1e-3), m.normal("residual", 8, 384, std=1e-3)
    return _add_norm(m, x, residual)


@CASES.add("fused_add_rms_norm", "halfway", cells=("sums at half a step",))
def _(m: Maker) -> Arguments:
    # Sums of a coarse and a fine part that lie between two neighbours of the dtype.
    half = {"f32": 2.0**-24, "f16": 2.0**-11, "bf16": 2.0**-8}[m.dtype]
    coarse = 1.0 + m.integers("coarse", 0, 64, 8, 384) / 64.0
    sign = 1 - 2 * m.integers("sign", 0, 2, 8, 384)
    return _add_norm(m, coarse * sign, half * (1 - 2 * m.integers("side", 0, 2, 8, 384)))


@CASES.add("fused_add_rms_norm", "cancel", cells=("residual outliers", "x opposes residual"))
def _(m: Maker) -> Arguments:
    residual = m.normal("residual", 8, 384, std=2.0)
    residual[:, -2:] *= 30.0
    x = m.normal("x", 8, 384, std=0.1) - 0.5 * residual
    return _add_norm(m, x, residual, epsilon=1e-5)


@CASES.add("fused_add_rms_norm", "one_row", cells=("rows=1",))
def _(m: Maker) -> Arguments:
    return _add_norm(m, m.normal("x", 1, 2304), m.normal("residual", 1, 2304, std=2.0))


@CASES.add("fused_add_rms_norm", "many_rows", cells=("rows=67",))
def _(m: Maker) -> Arguments:
    return _add_norm(m, m.normal("x", 67, 48), m.normal("residual", 67, 48, std=2.0))


@CASES.add("fused_add_rms_norm", "f32_weight", cells=("weight wider than x",))
def _(m: Maker) -> Arguments:
    inputs = _add_norm(m, m.normal("x", 8, 384), m.normal("residual", 8, 384, std=3.0))
    inputs["weight"] = m.float(m.normal("wide", 384, std=0.3, mean=1.0), "f32")
    return inputs


def _gated_norm(m: Maker, x: np.ndarray, activation: str = "silu", std: float = 2.0) -> Arguments:
    inputs = _norm(m, x)
    return {
        "x": inputs["x"],
        "weight": inputs["weight"],
        "z": m.float(m.normal("z", *x.shape, std=std)),
        "epsilon": inputs["epsilon"],
        "activation": activation,
    }


@CASES.add("rms_norm_gated", "heads", cells=("three dimensions",))
def _(m: Maker) -> Arguments:
    return _gated_norm(m, m.normal("x", 9, 4, 128))


@CASES.add("rms_norm_gated", "tinyvar", cells=("variance=epsilon", "gates beyond 7"))
def _(m: Maker) -> Arguments:
    return _gated_norm(m, m.normal("x", 24, 128, std=1e-3), std=6.0)


@CASES.add("rms_norm_gated", "sigmoid", cells=("sigmoid gate", "one row"))
def _(m: Maker) -> Arguments:
    return _gated_norm(m, m.normal("x", 1, 577), "sigmoid")


# ------------------------------------------------------------------------------- activations

GATED: tuple[tuple[str, dict[str, str]], ...] = (
    ("silu_and_mul", {}),
    ("gelu_and_mul", {"approximate": "none"}),
    ("gelu_and_mul", {"approximate": "tanh"}),
)


def _gated(op: str, extra: dict[str, str]) -> None:
    prefix = f"{extra['approximate']}_" if extra else ""

    @CASES.add(op, f"{prefix}plain", cells=("rows=8",))
    def _(m: Maker) -> Arguments:
        return {"x": m.float(m.normal("x", 8, 1024)), **extra}

    @CASES.add(op, f"{prefix}wide", cells=("gates beyond 7",))
    def _(m: Maker) -> Arguments:
        return {"x": m.float(m.normal("x", 8, 1024, std=6.0)), **extra}

    @CASES.add(op, f"{prefix}small", cells=("near linear",))
    def _(m: Maker) -> Arguments:
        return {"x": m.float(m.normal("x", 8, 1024, std=0.02)), **extra}

    @CASES.add(op, f"{prefix}closed", cells=("gates below zero", "odd width", "one row"))
    def _(m: Maker) -> Arguments:
        gate = m.normal("gate", 1, 2307, std=1.5, mean=-3.0)
        return {"x": m.float(np.concatenate([gate, m.normal("up", 1, 2307)], 1)), **extra}

    @CASES.add(op, f"{prefix}special", cells=("infinities", "NaN", "gates of +-100"))
    def _(m: Maker) -> Arguments:
        x = m.normal("x", 9, 512)
        x[0, 5], x[1, 300], x[2, 7], x[3, 400] = np.inf, np.inf, np.nan, np.nan
        x[4, :4], x[5, :4], x[6, 258] = 100.0, -100.0, -np.inf
        return {"x": m.float(x), **extra}


for _op, _extra in GATED:
    _gated(_op, _extra)


@CASES.add("mul_sigmoid", "plain", cells=("rows=8",), strided=("gate",))
def _(m: Maker) -> Arguments:
    return {"x": m.float(m.normal("x", 8, 256)), "gate": m.float(m.normal("gate", 8, 256, std=2.0))}


@CASES.add("mul_sigmoid", "wide", cells=("gates beyond 7", "odd width", "one row"))
def _(m: Maker) -> Arguments:
    x, gate = m.normal("x", 1, 577, std=3.0), m.normal("gate", 1, 577, std=6.0)
    return {"x": m.float(x), "gate": m.float(gate)}


# ---------------------------------------------------------------------------------- rotation

LONG = [0, 1, 255, 256, 257, 1023, 4095, 4097, 8191, 16383, 20001, 32767, 32769, 36001, 40000]
LONG += [40959]


def _rotary(
    m: Maker,
    positions: list[int],
    heads: tuple[int, int],
    head_size: int,
    rotary_dim: int,
    is_neox_style: bool = True,
    dtype: str = "f32",
) -> Arguments:
    # Points of the unit circle by its rational form: no sine of a library is involved.
    t = m.uniform("angle", max(positions) + 2, rotary_dim // 2) * 2.0 - 1.0
    cos, sin = (1 - t * t) / (1 + t * t), 2 * t / (1 + t * t)
    count = len(positions)
    query = m.normal("query", count, heads[0] * head_size)
    key = m.normal("key", count, heads[1] * head_size) if heads[1] else None
    return {
        "positions": m.ints(positions),
        "query": m.float(query),
        "key": None if key is None else m.float(key),
        "head_size": head_size,
        "cos_sin_cache": m.float(np.concatenate([cos, sin], 1), dtype),
        "is_neox_style": is_neox_style,
    }


@CASES.add("rotary_embedding", "short", cells=("GQA 3:1",), strided=("query", "key"))
def _(m: Maker) -> Arguments:
    return _rotary(m, list(range(11)), (3, 1), 64, 64)


@CASES.add("rotary_embedding", "long", cells=("positions beyond 32768",))
def _(m: Maker) -> Arguments:
    return _rotary(m, LONG, (2, 1), 64, 64)


@CASES.add("rotary_embedding", "partial", cells=("32 of 96 rotated", "positions fall"))
def _(m: Maker) -> Arguments:
    return _rotary(m, [300, 7, 7, 2049, 0, 40, 39], (3, 1), 96, 32)


@CASES.add("rotary_embedding", "pairs", cells=("pairs rotated, not halves",))
def _(m: Maker) -> Arguments:
    return _rotary(m, [3, 500, 0, 255, 256, 77, 4095], (3, 1), 64, 64, is_neox_style=False)


@CASES.add("rotary_embedding", "pairs_partial", cells=("pairs", "32 of 64 rotated"))
def _(m: Maker) -> Arguments:
    return _rotary(m, [3, 500, 0, 255, 256, 77, 4095], (3, 2), 64, 32, is_neox_style=False)


@CASES.add("rotary_embedding", "one_row", cells=("rows=1", "head_size=256"))
def _(m: Maker) -> Arguments:
    return _rotary(m, [1023], (8, 2), 256, 256)


def _mrotary(m: Maker, head_size: int, sections: list[int], interleaved: bool) -> Arguments:
    """Text, then an image of 3 by 4 whose time stands still, then text after it."""
    text, image = (
        np.arange(5),
        np.stack([np.full(12, 5), 5 + np.arange(12) // 4, 5 + np.arange(12) % 4]),
    )
    after = np.arange(9, 13)
    positions = np.concatenate([np.stack([text] * 3), image, np.stack([after] * 3)], axis=1)
    positions[:, -1] = (40, 3, 29)
    given = _rotary(m, positions.max(axis=0).tolist(), (3, 1), head_size, 2 * sum(sections))
    return {
        **given,
        "positions": m.ints(positions),
        "mrope_section": sections,
        "mrope_interleaved": interleaved,
    }


@CASES.add("mrotary_embedding", "sections", cells=("an image among text", "head_size=64"))
def _(m: Maker) -> Arguments:
    return _mrotary(m, 64, [8, 12, 12], interleaved=False)


@CASES.add("mrotary_embedding", "interleaved", cells=("64 of 128 rotated", "time has the rest"))
def _(m: Maker) -> Arguments:
    return _mrotary(m, 128, [12, 10, 10], interleaved=True)


@CASES.add("mrotary_embedding", "interleaved_most", cells=("sections of unlike length",))
def _(m: Maker) -> Arguments:
    return _mrotary(m, 96, [24, 8, 4], interleaved=True)


@CASES.add("rotary_embedding", "query_only", cells=("no key",))
def _(m: Maker) -> Arguments:
    return _rotary(m, list(range(250, 259)), (4, 0), 64, 64)


# ------------------------------------------------------------------------- linear, embedding


def _linear(m: Maker, x: np.ndarray, fan_out: int, bias: bool = False) -> Arguments:
    weight = m.normal("weight", fan_out, x.shape[-1], std=x.shape[-1] ** -0.5)
    return {
        "x": m.float(x),
        # As in a bfloat16 checkpoint: a provider that packs weights to half precision is exact.
        "weight": m.float(m.float(weight, "bf16").values()),
        "bias": m.float(m.float(m.normal("bias", fan_out), "bf16").values()) if bias else None,
    }


@CASES.add("linear", "plain", cells=("M=32",))
def _(m: Maker) -> Arguments:
    return _linear(m, m.normal("x", 32, 576), 96)


@CASES.add("linear", "one_row", cells=("M=1", "bias"))
def _(m: Maker) -> Arguments:
    return _linear(m, m.normal("x", 1, 192), 2304, bias=True)


@CASES.add("linear", "odd", cells=("M=17", "N=131", "K=191", "bias"))
def _(m: Maker) -> Arguments:
    return _linear(m, m.normal("x", 17, 191), 131, bias=True)


@CASES.add("linear", "last_k", cells=("most weight in the last element and tile of K",))
def _(m: Maker) -> Arguments:
    x = m.normal("x", 24, 576)
    x[:, -1] *= 30.0
    x[:, -32:] *= 4.0
    return _linear(m, x, 96)


@CASES.add("linear", "like_rows", cells=("rows that differ in one element",))
def _(m: Maker) -> Arguments:
    x = np.repeat(m.normal("x", 1, 256), 24, axis=0)
    x[np.arange(24), np.arange(24) * 10] += 2.0
    return _linear(m, x, 96)


@CASES.add("embedding", "plain", cells=("first and last id", "an id twice"))
def _(m: Maker) -> Arguments:
    ids = np.concatenate([[0, 256, 5, 5], m.integers("ids", 0, 257, 13)])
    return {"input_ids": m.ints(ids), "weight": m.float(m.normal("weight", 257, 72))}


@CASES.add("embedding", "one_row", cells=("rows=1", "int32 ids"))
def _(m: Maker) -> Arguments:
    weight = m.float(m.normal("weight", 65, 576))
    return {"input_ids": m.ints([64], "i32"), "weight": weight}
