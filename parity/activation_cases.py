# SPDX-License-Identifier: Apache-2.0
"""Witness inputs of the activations that few models have, and of the norm by mean and variance."""

from __future__ import annotations

from typing import Any

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()
KINDS = (
    *("gelu", "gelu_pytorch_tanh", "relu", "sigmoid", "silu", "tanh"),
    *("gelu_fast", "gelu_new", "quick_gelu", "relu2"),
)
"""In 16 bits upstream rounds those of the second line, the gated ones and xielu on the way."""
GATED: dict[str, dict[str, Any]] = {
    "fatrelu": {"kind": "fatrelu", "limit": 0.25, "alpha": 1.0, "beta": 0.0},
    "mul_and_silu": {"kind": "mul_and_silu", "limit": 0.0, "alpha": 1.0, "beta": 0.0},
    "silu_clamped": {"kind": "silu_clamped", "limit": 2.0, "alpha": 1.3, "beta": 1.0},
    "swigluoai": {"kind": "swigluoai", "limit": 7.0, "alpha": 1.702, "beta": 1.0},
    "swiglustep": {"kind": "swiglustep", "limit": 3.0, "alpha": 1.0, "beta": 0.0},
    "gelu_sparse": {"kind": "gelu_sparse", "limit": 0.0, "alpha": 0.8416212, "beta": 0.0},
}
"""`alpha` of gelu_sparse is how many deviations 80 % of a normal distribution lie below."""


def _values(m: Maker, width: int) -> np.ndarray:
    """Near zero, a few units around it, and far out, on both sides."""
    x = m.normal("x", 9, width, std=3.0)
    x[1], x[2] = x[1] * 1e-3, x[2] * 8.0
    return x


def _add(kind: str) -> None:
    @CASES.add("activation", kind, cells=(kind,))
    def _(m: Maker) -> Arguments:
        return {"x": m.float(_values(m, 257)), "kind": kind}


def _add_gated(name: str, how: dict[str, Any]) -> None:
    @CASES.add("activation_and_mul", name, cells=(name,))
    def _(m: Maker) -> Arguments:
        return {"x": m.float(_values(m, 514)), **how}


for _kind in KINDS:
    _add(_kind)
for _name, _how in GATED.items():
    _add_gated(_name, _how)


@CASES.add("xielu", "plain", cells=("both sides of zero",))
def _(m: Maker) -> Arguments:
    return {
        "x": m.float(_values(m, 257)),
        "alpha_p": m.float(np.array([0.7])),
        "alpha_n": m.float(np.array([-0.9])),
        "beta": 0.5,
        "eps": -1e-6,
    }


@CASES.add("xielu", "learnt", cells=("other coefficients",))
def _(m: Maker) -> Arguments:
    return {
        "x": m.float(_values(m, 96)),
        "alpha_p": m.float(np.array([-0.3])),
        "alpha_n": m.float(np.array([1.4])),
        "beta": 0.25,
        "eps": -1e-6,
    }


def _norm(m: Maker, x: np.ndarray, weight: bool, bias: bool) -> Arguments:
    hidden = x.shape[-1]
    return {
        "x": m.float(x),
        "weight": m.float(m.normal("weight", hidden, std=0.3, mean=1.0)) if weight else None,
        "bias": m.float(m.normal("bias", hidden)) if bias else None,
        "epsilon": 1e-5,
    }


@CASES.add("layer_norm", "plain", cells=("weight and bias",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 9, 384, std=3.0), True, True)


@CASES.add("layer_norm", "mean", cells=("mean far from zero", "weight alone"))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 9, 384) + 4.0, True, False)


@CASES.add("layer_norm", "tinyvar", cells=("variance=epsilon", "neither"))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 9, 384, std=3e-3), False, False)


@CASES.add("layer_norm", "heads", cells=("three dimensions",))
def _(m: Maker) -> Arguments:
    return _norm(m, m.normal("x", 5, 4, 64), True, True)
