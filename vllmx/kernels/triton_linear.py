# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of the fused linear layers, for a few rows: decoding small batches.

Such a layer is as fast as its weights come in. So a program asks for its whole tile of weights
before it waits for the kernel before it (programmatic dependent launch), a matrix is cut along the
inputs too until there are programs enough, and the program that comes last at a tile adds the
others' parts up, in their order. One row is multiplied element by element, more by tensor cores
(in Triton's interpreter, `WIDE`, in float32).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.ir.ops.fused_linear import linear_add, rms_norm_gated_linear, rms_norm_linear
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

MAX_ROWS = 32
"""Rows of a launch; more are done in several."""
ENOUGH_PROGRAMS = 128
MAX_STEPS = 4
"""Tiles that a program goes through, one after another."""


if SUPPORTED is True:

    @triton.jit
    def _few_rows_linear_kernel(
        x_ptr,
        x_stride,
        weight_ptr,
        residual_ptr,
        squares_ptr,
        norm_weight_ptr,
        epsilon,
        out_ptr,
        out_squares_ptr,
        part_ptr,
        count_ptr,
        num_rows,
        num_outputs,
        INPUTS: tl.constexpr,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        COLUMNS: tl.constexpr,
        SPLITS: tl.constexpr,
        GATED: tl.constexpr,
        ADDS: tl.constexpr,
        NORMS: tl.constexpr,
        PARTS: tl.constexpr,
        PARTS_BLOCK: tl.constexpr,
        ONE_ROW: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        tile = tl.program_id(0)
        split = tl.program_id(1)
        outputs = tile * OUTPUTS + tl.arange(0, OUTPUTS)
        inside = outputs < num_outputs
        steps: tl.constexpr = (INPUTS + SPLITS * COLUMNS - 1) // (SPLITS * COLUMNS)
        masked: tl.constexpr = INPUTS % (SPLITS * COLUMNS) != 0
        columns = split * steps * COLUMNS + tl.arange(0, COLUMNS)
        weights = weight_ptr + outputs.to(tl.int64)[:, None] * INPUTS + columns[None, :]
        up_weights = weights + num_outputs.to(tl.int64) * INPUTS
        wanted = inside[:, None]
        if masked:
            wanted = wanted & (columns < INPUTS)[None, :]
        # The weights do not depend on the kernel before this one.
        weight = tl.load(weights, mask=wanted, other=0.0)
        if GATED:
            up_weight = tl.load(up_weights, mask=wanted, other=0.0)
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        rows = tl.arange(0, ROWS)
        real = rows < num_rows
        if NORMS:
            parts = tl.arange(0, PARTS_BLOCK)
            squares = tl.load(
                squares_ptr + rows[:, None] * PARTS + parts[None, :],
                mask=real[:, None] & (parts < PARTS)[None, :],
                other=0.0,
            )
            factor = 1.0 / tl.sqrt(tl.sum(squares, axis=1) / INPUTS + epsilon)
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        up_total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for step in tl.static_range(steps):
            here = columns + step * COLUMNS
            if step > 0:
                wanted = inside[:, None]
                if masked:
                    wanted = wanted & (here < INPUTS)[None, :]
                weight = tl.load(weights + step * COLUMNS, mask=wanted, other=0.0)
                if GATED:
                    up_weight = tl.load(up_weights + step * COLUMNS, mask=wanted, other=0.0)
            known = real[:, None]
            if masked:
                known = known & (here < INPUTS)[None, :]
            x = tl.load(x_ptr + rows[:, None] * x_stride + here[None, :], mask=known, other=0.0)
            if NORMS:
                scale = tl.load(norm_weight_ptr + here, mask=here < INPUTS, other=0.0)
                # Rounded before the weight and after it, as the definition does.
                normed = (x.to(tl.float32) * factor[:, None]).to(scale.dtype).to(tl.float32)
                x = (normed * scale.to(tl.float32)[None, :]).to(x.dtype)
            if ONE_ROW:
                row = x.to(tl.float32)[:, None, :]
                total += tl.sum(row * weight.to(tl.float32)[None, :, :], axis=2)
                if GATED:
                    up_total += tl.sum(row * up_weight.to(tl.float32)[None, :, :], axis=2)
            else:
                if WIDE:
                    x = x.to(tl.float32)
                    weight = weight.to(tl.float32)
                total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
                if GATED:
                    if WIDE:
                        up_weight = up_weight.to(tl.float32)
                    up_total = tl.dot(x, tl.trans(up_weight), up_total, input_precision="ieee")

        mask = real[:, None] & inside[None, :]
        places = rows[:, None] * num_outputs + outputs[None, :]
        is_last = True
        if SPLITS > 1:
            plane = num_rows * num_outputs
            planes: tl.constexpr = 2 if GATED else 1
            tl.store(part_ptr + split * planes * plane + places, total, mask=mask)
            if GATED:
                tl.store(part_ptr + (split * 2 + 1) * plane + places, up_total, mask=mask)
            tl.debug_barrier()
            is_last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
            if is_last:
                total = tl.zeros([ROWS, OUTPUTS], tl.float32)
                up_total = tl.zeros([ROWS, OUTPUTS], tl.float32)
                for i in tl.static_range(SPLITS):
                    part = part_ptr + i * planes * plane + places
                    total += tl.load(part, mask=mask, other=0.0, cache_modifier=".cg")
                    if GATED:
                        up = tl.load(part + plane, mask=mask, other=0.0, cache_modifier=".cg")
                        up_total += up
                tl.store(count_ptr + tile, 0)
        if is_last:
            dtype = out_ptr.dtype.element_ty
            out = total.to(dtype)
            if GATED:
                gate = out.to(tl.float32)
                gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
                out = (gate * up_total.to(dtype).to(tl.float32)).to(dtype)
            if ADDS:
                residual = tl.load(residual_ptr + places, mask=mask, other=0.0).to(tl.float32)
                # Chosen, so that the compiler doesn't start the sum of products at the residual,
                # which in float32 triples the error.
                whole = tl.where(mask, out.to(tl.float32), 0.0) + residual
                out = whole.to(dtype)
                squares = tl.sum(tl.where(mask, whole * whole, 0.0), axis=1)
                tl.store(out_squares_ptr + rows * tl.num_programs(0) + tile, squares, mask=real)
            tl.store(out_ptr + places, out, mask=mask)


@dataclass(frozen=True)
class Tiles:
    """How a matrix is cut for some number of rows: outputs and inputs of a tile, splits, warps."""

    outputs: int
    columns: int
    splits: int
    warps: int = 4


def tiles_of(num_rows: int, num_outputs: int, num_inputs: int, gated: bool = False) -> Tiles:
    """The cut that was fastest on an H200, of those tried (reports/gpu/linear.md); `gated` has two
    tiles of weights at once."""
    whole = max(triton.next_power_of_2(num_inputs), 16)
    if num_rows == 1 and num_outputs < 2048 and whole <= (1024 if gated else 4096):
        # Whole rows of the matrix: nothing is left to be added up.
        return Tiles(8, whole, 1, warps=8)
    if num_rows == 1:
        outputs, columns = 16, 1024
    elif num_outputs >= 2048:
        outputs, columns = 64, 256
    else:
        outputs, columns = 32, 512
    columns = min(columns, whole)
    steps = triton.cdiv(num_inputs, columns)
    if num_rows > 1:
        # As many programs as there are tiles, until their parts outweigh the weights.
        splits = min(steps, 16)
    else:
        programs = triton.cdiv(num_outputs, outputs)
        splits = min(steps, triton.cdiv(ENOUGH_PROGRAMS, programs))
    splits = max(splits, triton.cdiv(steps, MAX_STEPS))
    return Tiles(outputs, columns, splits)


class FewRowsWeight:
    """A weight [out, in] and, for each tile of it, how many programs have come so far."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.contiguous()
        self.counts = torch.zeros(
            triton.cdiv(weight.shape[0], 8), dtype=torch.int32, device=weight.device
        )


def _run(
    x: Tensor,
    prepared: FewRowsWeight,
    residual: Tensor | None = None,
    norm: tuple[Tensor, Tensor, float] | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [num_tokens, out] and, with a residual, the squares [num_tokens, tiles].

    norm: squares of x's rows, norm weight, epsilon.
    """
    if x.shape[0] > MAX_ROWS:
        return _in_pieces(x, prepared, residual, norm, gated)
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = prepared.weight
    num_rows, num_inputs = x.shape
    num_outputs = weight.shape[0] // (2 if gated else 1)
    cut = tiles_of(num_rows, num_outputs, num_inputs, gated)
    tiles = triton.cdiv(num_outputs, cut.outputs)
    new: dict[str, Any] = {"device": x.device}
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, **new)
    out_squares = part = out
    if residual is not None:
        residual = residual.contiguous()
        out_squares = torch.empty((num_rows, tiles), dtype=torch.float32, **new)
    if cut.splits > 1:
        planes = cut.splits * (2 if gated else 1)
        part = torch.empty((planes, num_rows, num_outputs), dtype=torch.float32, **new)
    squares, norm_weight, epsilon = norm if norm is not None else (x, x, 0.0)
    squares = squares.contiguous()
    _few_rows_linear_kernel[(tiles, cut.splits)](
        x,
        x.stride(0),
        weight,
        out if residual is None else residual,
        squares,
        norm_weight,
        epsilon,
        out,
        out_squares,
        part,
        prepared.counts,
        num_rows,
        num_outputs,
        INPUTS=num_inputs,
        ROWS=1 if num_rows == 1 else max(triton.next_power_of_2(num_rows), 16),
        OUTPUTS=cut.outputs,
        COLUMNS=cut.columns,
        SPLITS=cut.splits,
        GATED=gated,
        ADDS=residual is not None,
        NORMS=norm is not None,
        PARTS=squares.shape[1],
        PARTS_BLOCK=triton.next_power_of_2(squares.shape[1]) if norm is not None else 1,
        ONE_ROW=num_rows == 1,
        WIDE=x.device.type == "cpu",
        num_warps=cut.warps,
        num_stages=2,
        **after_the_last(x.device),
    )
    return out, out_squares


def _in_pieces(
    x: Tensor,
    prepared: FewRowsWeight,
    residual: Tensor | None,
    norm: tuple[Tensor, Tensor, float] | None,
    gated: bool,
) -> tuple[Tensor, Tensor]:
    outs, squares = [], []
    for start in range(0, x.shape[0], MAX_ROWS):
        rows = slice(start, start + MAX_ROWS)
        part = None if norm is None else (norm[0][rows], norm[1], norm[2])
        more = None if residual is None else residual[rows]
        out, square = _run(x[rows], prepared, more, part, gated)
        outs.append(out)
        # A last piece of one row has other tiles.
        squares.append(square.sum(dim=-1, keepdim=True) if residual is not None else square)
    return torch.cat(outs), torch.cat(squares)


def _register(op: Any, fn: Any) -> None:
    op.register_impl("triton", supported=SUPPORTED, supports=on_gpu, prepare=FewRowsWeight)(fn)


def _linear_add(x: Tensor, residual: Tensor, prepared: FewRowsWeight) -> tuple[Tensor, Tensor]:
    return _run(x, prepared, residual=residual)


def _rms_norm_linear(
    x: Tensor, squares: Tensor, norm_weight: Tensor, epsilon: float, prepared: FewRowsWeight
) -> Tensor:
    return _run(x, prepared, norm=(squares, norm_weight, epsilon))[0]


def _rms_norm_gated_linear(
    x: Tensor, squares: Tensor, norm_weight: Tensor, epsilon: float, prepared: FewRowsWeight
) -> Tensor:
    return _run(x, prepared, norm=(squares, norm_weight, epsilon), gated=True)[0]


_register(linear_add, _linear_add)
_register(rms_norm_linear, _rms_norm_linear)
_register(rms_norm_gated_linear, _rms_norm_gated_linear)
