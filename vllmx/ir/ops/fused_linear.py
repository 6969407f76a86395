# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/{layernorm,activation,linear}.py @ v0.25.0
"""Linear layers with what comes before and after them: the norm, the gate, the residual.

`linear_add` ends a half of a decoder layer and says how large its rows are; the other two begin
the next half with that. A provider of one kernel each spares a small batch half of its launches.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import register_op
from vllmx.ir.ops.activation import silu_and_mul


@register_op(static_args=("weight",))
def linear_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """x @ weight.T + residual, and what the squares of its rows add up to.

    x: [num_tokens, in], weight: [out, in], residual: [num_tokens, out]. The product is rounded to
    x's dtype before the sum is taken in float32. Returns the sum in x's dtype, and float32
    [num_tokens, parts], whose sum over the parts is that of the squares.
    """
    total = F.linear(x, weight).to(torch.float32) + residual.to(torch.float32)
    return total.to(x.dtype), total.pow(2).sum(dim=-1, keepdim=True)


@linear_add.register_canonical
def _whole_squares(outputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """With one part, however many a provider has."""
    return outputs[0], outputs[1].sum(dim=-1, keepdim=True)


@register_op(static_args=("weight",))
def rms_norm_linear(
    x: Tensor, squares: Tensor, norm_weight: Tensor, epsilon: float, weight: Tensor
) -> Tensor:
    """rms_norm(x) @ weight.T for rows whose squares are known.

    x: [num_tokens, in]; squares: float32 [num_tokens, parts] as `linear_add` returns them;
    norm_weight: [in]; weight: [out, in]. Returns [num_tokens, out] in x's dtype.
    """
    mean = squares.sum(dim=-1, keepdim=True) / x.shape[-1]
    normed = x.to(torch.float32) * torch.rsqrt(mean + epsilon)
    return F.linear((normed.to(norm_weight.dtype) * norm_weight).to(x.dtype), weight)


@register_op(static_args=("weight",))
def rms_norm_gated_linear(
    x: Tensor, squares: Tensor, norm_weight: Tensor, epsilon: float, weight: Tensor
) -> Tensor:
    """silu(gate) * up of `rms_norm_linear`, whose first half of outputs is the gate.

    weight: [2 * out, in]. Returns [num_tokens, out] in x's dtype; the rest as there.
    """
    return silu_and_mul.fn(rms_norm_linear.fn(x, squares, norm_weight, epsilon, weight))


linear_add.set_tolerance(
    torch.bfloat16,
    2e-2,
    1.6e-2,
    "a product of about 4 is off by its last place, 0.016; the sum with the residual may be near 0",
)
rms_norm_linear.set_tolerance(
    torch.bfloat16, 2e-2, 1.6e-2, "sums of normed inputs near 0 were off by 0.013 of 8 at most"
)
rms_norm_gated_linear.set_tolerance(
    torch.bfloat16,
    4e-2,
    4e-2,
    "gate and up are off by a last place each before they are multiplied: 0.036 measured",
)

SIZES = ((1, 64, 16), (8, 608, 48), (17, 96, 64), (40, 128, 32), (1, 4224, 24))
"""Tokens, inputs, outputs; the second and the last have inputs that are split over programs."""


def _normal(*shape: int, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=generator) * scale


@linear_add.register_inputs
def _linear_add_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, fan_in, fan_out = SIZES[case % len(SIZES)]
    drawn = {
        "x": _normal(tokens, fan_in, generator=generator),
        "residual": _normal(tokens, fan_out, generator=generator),
        "weight": _normal(fan_out, fan_in, generator=generator, scale=fan_in**-0.5),
    }
    return {name: tensor.to(device, dtype) for name, tensor in drawn.items()}


def _norm_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator, halves: int
) -> dict[str, Any]:
    tokens, fan_in, fan_out = SIZES[case % len(SIZES)]
    rows = halves * fan_out
    x = _normal(tokens, fan_in, generator=generator).to(device, dtype)
    parts = x.float().pow(2).view(tokens, -1, 16).sum(dim=-1)
    return {
        "x": x,
        "squares": parts if case % 2 else parts.sum(dim=-1, keepdim=True),
        "norm_weight": (_normal(fan_in, generator=generator, scale=0.1) + 1.0).to(device, dtype),
        "epsilon": 1e-6,
        "weight": _normal(rows, fan_in, generator=generator, scale=fan_in**-0.5).to(device, dtype),
    }


@rms_norm_linear.register_inputs
def _rms_norm_linear_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    return _norm_inputs(case, dtype, device, generator, 1)


@rms_norm_gated_linear.register_inputs
def _rms_norm_gated_linear_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    return _norm_inputs(case, dtype, device, generator, 2)
