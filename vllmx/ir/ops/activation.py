# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/activation.py @ v0.25.0
"""Gated activations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row

SIZES = ((1, 2), (3, 128), (17, 3072), (63, 34))


@register_op
def silu_and_mul(x: Tensor) -> Tensor:
    """silu(x[..., :d]) * x[..., d:]; x: [..., 2 d], returns [..., d] in x's dtype."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@register_op
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x[..., :d]) * x[..., d:]; approximate: "none" or "tanh"; x: [..., 2 d]."""
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half], approximate=approximate) * x[..., half:]


@register_op
def mul_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate), in float32 and rounded once; x, gate: [..., d], returns x's dtype."""
    return (x.to(torch.float32) * torch.sigmoid(gate.to(torch.float32))).to(x.dtype)


mul_sigmoid.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(mul_sigmoid.fn, "x", "gate"))
silu_and_mul.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(silu_and_mul.fn, "x"))
gelu_and_mul.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(gelu_and_mul.fn, "x"))
mul_sigmoid.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(mul_sigmoid.fn, "x", "gate"))


@silu_and_mul.register_inputs
def _silu_and_mul_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    shape = SIZES[case % len(SIZES)]
    return {"x": (torch.randn(shape, generator=generator) * 3).to(device, dtype)}


@gelu_and_mul.register_inputs
def _gelu_and_mul_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    inputs = _silu_and_mul_inputs(case, dtype, device, generator)
    return {**inputs, "approximate": "tanh" if case % 2 else "none"}


@mul_sigmoid.register_inputs
def _mul_sigmoid_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    x, gate = _silu_and_mul_inputs(case, dtype, device, generator)["x"].chunk(2, dim=-1)
    return {"x": x, "gate": gate}
