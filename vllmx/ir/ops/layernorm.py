# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/ir/ops/layernorm.py @ v0.25.0
"""Root-mean-square norms."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, OpContext, register_op
from vllmx.ir.row_by_row import row_by_row

WHOLE_ROWS_ONLY = "takes the mean of whole rows, not of a part of each"
SIZES = ((1, 64), (3, 576), (17, 640), (63, 128), (2, 1))


@register_op(static_args=("weight",))
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon), times weight, over the last dimension.

    x: [..., hidden], any float dtype, computed in float32; weight: [hidden], in whose dtype the
    product is taken; variance_size: leading elements the mean covers. Returns x's shape and dtype.
    """
    wide = x.to(torch.float32)
    part = wide if variance_size is None else wide[..., :variance_size]
    wide = wide * torch.rsqrt(part.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        wide = wide.to(weight.dtype) * weight
    return wide.to(x.dtype)


@register_op(static_args=("weight",))
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The norm of x + x_residual, and that sum, both in x's dtype.

    The sum is taken and normed in float32; x and x_residual: [..., hidden]. A provider may
    overwrite both inputs.
    """
    total = x.to(torch.float32) + x_residual.to(torch.float32)
    part = total if variance_size is None else total[..., :variance_size]
    normed = total * torch.rsqrt(part.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    if weight is not None:
        normed = normed.to(weight.dtype) * weight
    return normed.to(x.dtype), total.to(x.dtype)


@register_op(static_args=("weight", "bias"))
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """(x - mean) / sqrt(variance + epsilon) * weight + bias, over the last dimension.

    x: [..., hidden]; weight, bias: [hidden]. Computed in float32; returns x's shape and dtype.
    """
    scale, shift = (None if part is None else part.to(torch.float32) for part in (weight, bias))
    wide = F.layer_norm(x.to(torch.float32), x.shape[-1:], scale, shift, epsilon)
    return wide.to(x.dtype)


@register_op(static_args=("weight",))
def rms_norm_gated(
    x: Tensor, weight: Tensor, z: Tensor, epsilon: float, activation: str = "silu"
) -> Tensor:
    """The norm of x, times weight, and only then times activation(z).

    x, z: [..., hidden]; weight: [hidden]; activation: "silu" or "sigmoid". Computed in float32;
    returns x's shape and dtype.
    """
    normed, gate = x.to(torch.float32), z.to(torch.float32)
    normed = normed * torch.rsqrt(normed.pow(2).mean(dim=-1, keepdim=True) + epsilon)
    gate = torch.sigmoid(gate) if activation == "sigmoid" else F.silu(gate)
    return (normed * weight.to(torch.float32) * gate).to(x.dtype)


rms_norm_gated.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(rms_norm_gated.fn, "x", "z"))
rms_norm.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(rms_norm.fn, "x"))
fused_add_rms_norm.set_batch_invariant(
    REFERENCE, ANY_DEVICE, row_by_row(fused_add_rms_norm.fn, "x", "x_residual")
)


layer_norm.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(layer_norm.fn, "x"))


def whole_rows(context: OpContext) -> bool | str:
    """A `supports` of providers that know no `variance_size`."""
    return True if context.facts.get("variance_size") is None else WHOLE_ROWS_ONLY


def whole_rows_where(
    rule: Callable[[OpContext], bool | str],
) -> Callable[[OpContext], bool | str]:
    """A `supports` of providers that know no `variance_size` and have a rule of their own."""

    def supports(context: OpContext) -> bool | str:
        answer = whole_rows(context)
        return rule(context) if answer is True else answer

    return supports


@rms_norm.register_facts
@fused_add_rms_norm.register_facts
def _norm_facts(
    weight: Tensor | None, variance_size: int | None = None, **_: Any
) -> dict[str, Any]:
    return {"variance_size": variance_size, "has_weight": weight is not None}


@rms_norm.register_inputs
def _rms_norm_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    rows, hidden = SIZES[case % len(SIZES)]
    # Case 1 has rows of tiny and huge variance, which a kernel that misplaces epsilon gets wrong.
    scale = torch.logspace(-4, 2, rows).unsqueeze(1) if case == 1 else torch.ones(rows, 1)
    x = torch.randn(rows, hidden, generator=generator) * scale
    weight = torch.randn(hidden, generator=generator)
    return {
        "x": x.to(device, dtype),
        "weight": weight.to(device, dtype),
        "epsilon": 1e-5,
        "variance_size": None,
    }


@fused_add_rms_norm.register_inputs
def _fused_add_rms_norm_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _rms_norm_inputs(case, dtype, device, generator)
    residual = torch.randn(inputs["x"].shape, generator=generator)
    return {"x": inputs.pop("x"), "x_residual": residual.to(device, dtype), **inputs}


@rms_norm_gated.register_inputs
def _rms_norm_gated_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _rms_norm_inputs(case, dtype, device, generator)
    z = torch.randn(inputs["x"].shape, generator=generator) * 3
    return {
        "x": inputs["x"],
        "weight": inputs["weight"],
        "z": z.to(device, dtype),
        "epsilon": inputs["epsilon"],
        "activation": "sigmoid" if case % 2 else "silu",
    }


@layer_norm.register_inputs
def _layer_norm_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _rms_norm_inputs(case, dtype, device, generator)
    bias = torch.randn(inputs["weight"].shape, generator=generator).to(device, dtype)
    return {
        "x": inputs["x"],
        "weight": inputs["weight"] if case % 2 == 0 else None,
        "bias": bias if case == 0 else None,
        "epsilon": inputs["epsilon"],
    }
