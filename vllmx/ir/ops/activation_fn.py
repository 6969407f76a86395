# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/activation.py @ v0.25.0
"""Activations of one input, and the gated ones that few models have.

All are computed in float32 and rounded once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row

SIZES = ((1, 2), (3, 128), (17, 3072), (63, 34))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_tanh_gelu = partial(F.gelu, approximate="tanh")
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_new": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}
"""Name in a config -> what it computes; three of them are spellings of one gelu."""


@register_op
def activation(x: Tensor, kind: str) -> Tensor:
    """kind(x), of KINDS, element by element; returns x's shape and dtype."""
    return KINDS[kind](x.to(torch.float32)).to(x.dtype)


@register_op
def xielu(
    x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, eps: float = -1e-6
) -> Tensor:
    """ap x^2 + beta x where x is positive, else an (exp(min(x, eps)) - 1 - x) + beta x.

    ap = softplus(alpha_p), an = beta + softplus(alpha_n); both [1], as a checkpoint has them.
    """
    wide = x.to(torch.float32)
    positive = F.softplus(alpha_p.to(torch.float32))
    negative = beta + F.softplus(alpha_n.to(torch.float32))
    above = positive * wide * wide
    below = (torch.expm1(wide.clamp(max=eps)) - wide) * negative
    return (torch.where(wide > 0, above, below) + beta * wide).to(x.dtype)


@register_op
def activation_and_mul(
    x: Tensor, kind: str, limit: float = 0.0, alpha: float = 1.0, beta: float = 0.0
) -> Tensor:
    """act(a) * b of the halves a, b of x [..., 2 d]; returns [..., d] in x's dtype.

    fatrelu      a where it is above `limit`, else 0; times b
    mul_and_silu a * silu(b)
    silu_clamped a * sigmoid(alpha a) * (b + beta), a at most `limit`, b within +- `limit`
    swigluoai    the same with a and b at even and odd places
    swiglustep   silu(a) at most `limit`, b within +- `limit`
    gelu_sparse  gelu of what a exceeds its row's mean by, less `alpha` deviations; times b
    """
    wide = x.to(torch.float32)
    a, b = (wide[..., ::2], wide[..., 1::2]) if kind == "swigluoai" else wide.chunk(2, dim=-1)
    if kind == "fatrelu":
        out = F.threshold(a, limit, 0.0) * b
    elif kind == "mul_and_silu":
        out = a * F.silu(b)
    elif kind in ("silu_clamped", "swigluoai"):
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        out = a * torch.sigmoid(alpha * a) * (b + beta)
    elif kind == "swiglustep":
        out = F.silu(a).clamp(max=limit) * b.clamp(-limit, limit)
    else:
        assert kind == "gelu_sparse", kind
        deviation = torch.std(a, dim=-1, keepdim=True, unbiased=False)
        cut = F.relu(a - (a.mean(dim=-1, keepdim=True) + alpha * deviation))
        out = F.gelu(cut, approximate="tanh") * b
    return out.to(x.dtype)


activation.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(activation.fn, "x"))
xielu.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(xielu.fn, "x"))
activation_and_mul.set_batch_invariant(
    REFERENCE, ANY_DEVICE, row_by_row(activation_and_mul.fn, "x")
)


@activation.register_inputs
def _activation_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    x = torch.randn(SIZES[case % len(SIZES)], generator=generator) * 3
    return {"x": x.to(device, dtype), "kind": sorted(KINDS)[case % len(KINDS)]}


@xielu.register_inputs
def _xielu_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _activation_inputs(case, dtype, device, generator)
    alphas = torch.tensor([0.2, -1.0]).to(device, dtype)
    return {"x": inputs["x"], "alpha_p": alphas[:1], "alpha_n": alphas[1:]}


@activation_and_mul.register_inputs
def _activation_and_mul_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    kinds = ("fatrelu", "mul_and_silu", "silu_clamped", "swigluoai", "swiglustep", "gelu_sparse")
    inputs = _activation_inputs(case, dtype, device, generator)
    return {"x": inputs["x"], "kind": kinds[case % len(kinds)], "limit": 1.5}
