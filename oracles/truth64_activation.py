# SPDX-License-Identifier: Apache-2.0
"""Activations and the norm by mean and variance in float64; see truth64_ops.py."""

from __future__ import annotations

import math

import numpy as np

from oracles.truth64_ops import TRUTH, Outputs, _erf, truth

__all__ = ["TRUTH"]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


@truth
def activation(x: np.ndarray, kind: str) -> Outputs:
    """out: the function of that name."""
    if kind in ("gelu_fast", "gelu_new", "gelu_pytorch_tanh"):
        return {"out": _gelu_tanh(x)}
    if kind == "gelu":
        return {"out": 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0)))}
    if kind in ("silu", "quick_gelu"):
        return {"out": x * _sigmoid(x if kind == "silu" else 1.702 * x)}
    if kind in ("relu", "relu2"):
        return {"out": np.maximum(x, 0.0) ** (1 if kind == "relu" else 2)}
    return {"out": np.tanh(x) if kind == "tanh" else _sigmoid(x)}


@truth
def activation_and_mul(
    x: np.ndarray, kind: str, limit: float, alpha: float, beta: float
) -> Outputs:
    """out: the gate of that kind, of halves or of neighbours."""
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if kind == "swigluoai" else (x[..., :half], x[..., half:])
    if kind == "fatrelu":
        return {"out": np.where(a > limit, a, 0.0) * b}
    if kind == "mul_and_silu":
        return {"out": a * b * _sigmoid(b)}
    if kind == "gelu_sparse":
        kept = a - (a.mean(axis=-1, keepdims=True) + alpha * a.std(axis=-1, keepdims=True))
        return {"out": _gelu_tanh(np.maximum(kept, 0.0)) * b}
    b = np.clip(b, -limit, limit)
    if kind == "swiglustep":
        return {"out": np.minimum(a * _sigmoid(a), limit) * b}
    a = np.minimum(a, limit)
    return {"out": a * _sigmoid(alpha * a) * (b + beta)}


@truth
def xielu(
    x: np.ndarray, alpha_p: np.ndarray, alpha_n: np.ndarray, beta: float, eps: float
) -> Outputs:
    """out: a parabola above zero, an exponential below, and a line through both."""
    above, below = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))
    curve = np.where(x > 0, above * x * x, (np.expm1(np.minimum(x, eps)) - x) * below)
    return {"out": curve + beta * x}


@truth
def layer_norm(
    x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, epsilon: float
) -> Outputs:
    """out: x less its mean, by the root of variance and epsilon, times weight, plus bias."""
    apart = x - x.mean(axis=-1, keepdims=True)
    out = apart / np.sqrt((apart**2).mean(axis=-1, keepdims=True) + epsilon)
    out = out if weight is None else out * weight
    return {"out": out if bias is None else out + bias}
