# SPDX-License-Identifier: Apache-2.0
"""Provider `triton`: our own kernels for a GPU.

Each kernel loads, computes in float32, and rounds once when it stores. That is right on a GPU and
in Triton's interpreter, whose bfloat16 arithmetic is not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.activation import gelu_and_mul, silu_and_mul
from vllmx.ir.ops.layernorm import fused_add_rms_norm, rms_norm
from vllmx.ir.ops.linear import embedding
from vllmx.ir.ops.rotary import rotary_embedding
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

MAX_ROW = 65536
"""Longest row that one program holds in registers."""


def _holds_rows(context: OpContext) -> bool | str:
    hidden_size = context.facts.get("hidden_size", 0)
    if context.device == "cuda" and hidden_size > MAX_ROW:
        return f"holds at most {MAX_ROW} elements of a row, not {hidden_size}"
    return on_gpu(context)


if SUPPORTED is True:

    @triton.jit
    def _rms_norm_kernel(
        x_ptr,
        x_stride,
        residual_ptr,
        residual_stride,
        weight_ptr,
        out_ptr,
        epsilon,
        hidden,
        variance_size,
        HAS_RESIDUAL: tl.constexpr,
        HAS_WEIGHT: tl.constexpr,
        BLOCK: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        columns = tl.arange(0, BLOCK)
        inside = columns < hidden
        if HAS_WEIGHT:
            # No kernel before this one writes it: it comes in while that one ends.
            weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            place = residual_ptr + row * residual_stride + columns
            x += tl.load(place, mask=inside, other=0.0).to(tl.float32)
            tl.store(place, x.to(residual_ptr.dtype.element_ty), mask=inside)
        counted = tl.where(columns < variance_size, x, 0.0)
        variance = tl.sum(counted * counted, axis=0) / variance_size
        y = x * (1.0 / tl.sqrt(variance + epsilon))
        if HAS_WEIGHT:
            y *= weight.to(tl.float32)
        out = out_ptr + row * hidden + columns
        tl.store(out, y.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _embedding_kernel(
        ids_ptr, table_ptr, table_stride, out_ptr, hidden, vocab_size, BLOCK: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(ids_ptr + token).to(tl.int64)
        tl.device_assert((row >= 0) & (row < vocab_size), "a token id is not in the vocabulary")
        inside = columns < hidden
        x = tl.load(table_ptr + row * table_stride + columns, mask=inside, other=0.0)
        tl.store(out_ptr + token * hidden + columns, x, mask=inside)

    @triton.jit
    def _silu_and_mul_kernel(
        x_ptr, x_stride, out_ptr, half, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < half
        gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * x_stride + half + columns, mask=inside, other=0.0)
        # The reference rounds silu(gate) to the activation dtype before it multiplies.
        gate = (gate / (1.0 + tl.exp(-gate))).to(out_ptr.dtype.element_ty).to(tl.float32)
        y = gate * up.to(tl.float32)
        tl.store(out_ptr + row * half + columns, y.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _gelu_and_mul_kernel(
        x_ptr,
        x_stride,
        out_ptr,
        half,
        TANH: tl.constexpr,
        BLOCK: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < half
        gate = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(x_ptr + row * x_stride + half + columns, mask=inside, other=0.0)
        if TANH:
            # (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), where nothing cancels.
            u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            gate = gate / (1.0 + tl.exp(-2.0 * u))
        else:
            gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
        gate = gate.to(out_ptr.dtype.element_ty).to(tl.float32)
        y = gate * up.to(tl.float32)
        tl.store(out_ptr + row * half + columns, y.to(out_ptr.dtype.element_ty), mask=inside)

    @triton.jit
    def _rotary_kernel(
        positions_ptr,
        x_ptr,
        x_stride,
        out_ptr,
        cache_ptr,
        num_heads,
        head_size,
        half,
        NEOX: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        position = tl.load(positions_ptr + token).to(tl.int64)
        i = tl.arange(0, BLOCK)
        x_row = x_ptr + token * x_stride + head * head_size
        out_row = out_ptr + (token * num_heads + head) * head_size
        dtype = out_ptr.dtype.element_ty

        in_half = i < half
        cos = tl.load(cache_ptr + position * 2 * half + i, mask=in_half, other=0.0)
        sin = tl.load(cache_ptr + position * 2 * half + half + i, mask=in_half, other=0.0)
        cos = cos.to(tl.float32)
        sin = sin.to(tl.float32)
        if NEOX:
            first, second = i, i + half
        else:
            first, second = 2 * i, 2 * i + 1
        a = tl.load(x_row + first, mask=in_half, other=0.0).to(tl.float32)
        b = tl.load(x_row + second, mask=in_half, other=0.0).to(tl.float32)
        tl.store(out_row + first, (a * cos - b * sin).to(dtype), mask=in_half)
        tl.store(out_row + second, (b * cos + a * sin).to(dtype), mask=in_half)

        rest = (i >= 2 * half) & (i < head_size)
        tl.store(out_row + i, tl.load(x_row + i, mask=rest, other=0.0), mask=rest)


ROW_BY_ROW: dict[str, Any] = {
    "supported": SUPPORTED,
    "supports": _holds_rows,
    "batch_invariant": ("cuda",),
}
"""A program has a row, or a part of one; it knows of no other."""


def _rows(x: Tensor) -> Tensor:
    """x as rows of its last dimension, whose elements must lie side by side."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, epsilon: float, size: int | None
) -> Tensor:
    rows = _rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    hidden = x.shape[-1]
    other: Any = rows if residual is None else residual
    _rms_norm_kernel[(rows.shape[0],)](
        rows,
        rows.stride(0),
        other,
        other.stride(0),
        rows if weight is None else weight,
        out,
        epsilon,
        hidden,
        hidden if size is None else size,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        BLOCK=triton.next_power_of_2(hidden),
        num_warps=8 if hidden >= 4096 else 4,
        **after_the_last(x.device),
    )
    return out


@rms_norm.register_impl("triton", **ROW_BY_ROW)
def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    return _norm(x, None, weight, epsilon, variance_size)


@fused_add_rms_norm.register_impl("triton", **ROW_BY_ROW)
def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    residual = x_residual.contiguous().view(-1, x.shape[-1])
    out = _norm(x, residual, weight, epsilon, variance_size)
    return out, residual.view(x.shape)


@embedding.register_impl("triton", **ROW_BY_ROW)
def _embedding(input_ids: Tensor, weight: Tensor) -> Tensor:
    hidden, block = weight.shape[1], 1024
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    out = torch.empty((*input_ids.shape, hidden), dtype=weight.dtype, device=weight.device)
    _embedding_kernel[(input_ids.numel(), triton.cdiv(hidden, block))](
        *(input_ids.contiguous(), weight, weight.stride(0), out, hidden, weight.shape[0]),
        BLOCK=block,
    )
    return out


@silu_and_mul.register_impl("triton", **ROW_BY_ROW)
def _silu_and_mul(x: Tensor) -> Tensor:
    rows, half, block = _rows(x), x.shape[-1] // 2, 1024
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    grid = (rows.shape[0], triton.cdiv(half, block))
    _silu_and_mul_kernel[grid](
        rows, rows.stride(0), out, half, BLOCK=block, **after_the_last(x.device)
    )
    return out


@gelu_and_mul.register_impl("triton", **ROW_BY_ROW)
def _gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    rows, half, block = _rows(x), x.shape[-1] // 2, 1024
    out = torch.empty((*x.shape[:-1], half), dtype=x.dtype, device=x.device)
    _gelu_and_mul_kernel[(rows.shape[0], triton.cdiv(half, block))](
        rows,
        rows.stride(0),
        out,
        half,
        TANH=approximate == "tanh",
        BLOCK=block,
        **after_the_last(x.device),
    )
    return out


@rotary_embedding.register_impl("triton", **ROW_BY_ROW)
def _rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    args = (head_size, cos_sin_cache, is_neox_style)
    rotated = _rotate(positions, query, *args)
    return rotated, None if key is None else _rotate(positions, key, *args)


def _rotate(
    positions: Tensor, x: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> Tensor:
    rows = _rows(x.flatten(1))
    heads = rows.shape[1] // head_size
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _rotary_kernel[(rows.shape[0], heads)](
        positions,
        rows,
        rows.stride(0),
        out,
        cos_sin_cache,
        heads,
        head_size,
        cos_sin_cache.shape[-1] // 2,
        NEOX=is_neox_style,
        BLOCK=triton.next_power_of_2(head_size),
    )
    return out
