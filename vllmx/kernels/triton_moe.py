# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of the experts: four launches, none of which waits for the host.

A token and the place of one of its experts are a slot. `_sort_kernel` puts the slots in the order
of their experts; a tile is some slots of one expert, and each program of the two that multiply
finds out from the experts' numbers of slots whose its tile is. There are as many programs as tiles
could be at most, whatever the router says: the launches can be captured. `_combine_kernel` adds
what a token's experts have found.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.ops.fused_moe import ACTIVATIONS, fused_experts
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"


if SUPPORTED is True:

    @triton.jit
    def _sort_kernel(
        ids_ptr,
        places_ptr,
        starts_ptr,
        num_slots,
        BLOCK: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        """places[starts[e]:starts[e + 1]] are the slots of expert e, by rising number."""
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert = tl.program_id(0)
        # Those of experts before this one; each program counts for itself.
        start = tl.zeros([], tl.int32)
        for first in range(0, num_slots, BLOCK):
            slots = first + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=2147483647)
            start += tl.sum((ids < expert).to(tl.int32), axis=0)
        tl.store(starts_ptr + expert, start)
        if expert == tl.num_programs(0) - 1:
            tl.store(starts_ptr + expert + 1, num_slots)
        for first in range(0, num_slots, BLOCK):
            slots = first + tl.arange(0, BLOCK)
            ids = tl.load(ids_ptr + slots, mask=slots < num_slots, other=-1)
            mine = (ids == expert).to(tl.int32)
            tl.store(places_ptr + start + tl.cumsum(mine, axis=0) - 1, slots, mask=mine > 0)
            start += tl.sum(mine, axis=0)

    @triton.jit
    def _tile(
        starts_ptr, tile, EXPERTS: tl.constexpr, EXPERTS_BLOCK: tl.constexpr, ROWS: tl.constexpr
    ):
        """(expert of a tile, where its rows begin among the sorted slots, where they end)."""
        experts = tl.arange(0, EXPERTS_BLOCK)
        there = experts < EXPERTS
        starts = tl.load(starts_ptr + experts, mask=there, other=0)
        ends = tl.load(starts_ptr + experts + 1, mask=there, other=0)
        tiles = (ends - starts + ROWS - 1) // ROWS
        before = tl.cumsum(tiles, axis=0) - tiles
        mine = (before <= tile) & (tile < before + tiles)
        expert = tl.sum(tl.where(mine, experts, 0), axis=0)
        first = tl.sum(tl.where(mine, starts + (tile - before) * ROWS, 0), axis=0)
        # Past the last tile nothing is mine: an empty one.
        end = tl.sum(tl.where(mine, ends, 0), axis=0)
        return expert, first, end

    @triton.jit
    def _gate_up_kernel(
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        places_ptr,
        starts_ptr,
        out_ptr,
        inner,
        INPUTS: tl.constexpr,
        TOPK: tl.constexpr,
        EXPERTS: tl.constexpr,
        EXPERTS_BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        COLUMNS: tl.constexpr,
        ACTIVATION: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        """Sorted slot -> activation(gate(x), up(x)) of its expert, [slots, inner]."""
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert, first, end = _tile(starts_ptr, tl.program_id(1), EXPERTS, EXPERTS_BLOCK, ROWS)
        if first < end:
            rows = first + tl.arange(0, ROWS)
            real = rows < end
            tokens = tl.load(places_ptr + rows, mask=real, other=0) // TOPK
            outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
            inside = outputs < inner
            columns = tl.arange(0, COLUMNS)
            inputs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride + columns[None, :]
            wide_expert = expert.to(tl.int64)
            gates = weight_ptr + (wide_expert * 2 * inner + outputs[:, None]) * INPUTS
            gates += columns[None, :]
            ups = gates + inner.to(tl.int64) * INPUTS
            gate = tl.zeros([ROWS, OUTPUTS], tl.float32)
            up = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for at in range(0, INPUTS, COLUMNS):
                known = (columns < INPUTS - at)[None, :]
                x = tl.load(inputs + at, mask=real[:, None] & known, other=0.0)
                w = tl.load(gates + at, mask=inside[:, None] & known, other=0.0)
                v = tl.load(ups + at, mask=inside[:, None] & known, other=0.0)
                if WIDE:
                    x = x.to(tl.float32)
                    w = w.to(tl.float32)
                    v = v.to(tl.float32)
                gate = tl.dot(x, tl.trans(w), gate, input_precision="ieee")
                up = tl.dot(x, tl.trans(v), up, input_precision="ieee")
            if HAS_BIAS:
                biases = bias_ptr + wide_expert * 2 * inner + outputs
                gate += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
                up += tl.load(biases + inner, mask=inside, other=0.0).to(tl.float32)[None, :]
            if ACTIVATION == "silu":
                gate = gate / (1.0 + tl.exp(-gate))
            elif ACTIVATION == "gelu":
                gate = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
            elif ACTIVATION == "gelu_tanh":
                # (1 + tanh(u)) / 2 = 1 / (1 + e^(-2 u)), where nothing cancels.
                u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
                gate = gate / (1.0 + tl.exp(-2.0 * u))
            else:
                gate = tl.minimum(gate, 7.0)
                gate = gate / (1.0 + tl.exp(-1.702 * gate))
                up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
            found = (gate * up).to(out_ptr.dtype.element_ty)
            places = rows.to(tl.int64)[:, None] * inner + outputs[None, :]
            tl.store(out_ptr + places, found, mask=real[:, None] & inside[None, :])

    @triton.jit
    def _down_kernel(
        x_ptr,
        weight_ptr,
        bias_ptr,
        places_ptr,
        starts_ptr,
        out_ptr,
        hidden,
        INPUTS: tl.constexpr,
        EXPERTS: tl.constexpr,
        EXPERTS_BLOCK: tl.constexpr,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        COLUMNS: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        """Sorted slot -> down(x) of its expert, at the slot's own place: [slots, hidden]."""
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert, first, end = _tile(starts_ptr, tl.program_id(1), EXPERTS, EXPERTS_BLOCK, ROWS)
        if first < end:
            rows = first + tl.arange(0, ROWS)
            real = rows < end
            slots = tl.load(places_ptr + rows, mask=real, other=0)
            outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
            inside = outputs < hidden
            columns = tl.arange(0, COLUMNS)
            inputs = x_ptr + rows.to(tl.int64)[:, None] * INPUTS + columns[None, :]
            wide_expert = expert.to(tl.int64)
            weights = weight_ptr + (wide_expert * hidden + outputs[:, None]) * INPUTS
            weights += columns[None, :]
            total = tl.zeros([ROWS, OUTPUTS], tl.float32)
            for at in range(0, INPUTS, COLUMNS):
                known = (columns < INPUTS - at)[None, :]
                x = tl.load(inputs + at, mask=real[:, None] & known, other=0.0)
                w = tl.load(weights + at, mask=inside[:, None] & known, other=0.0)
                if WIDE:
                    x = x.to(tl.float32)
                    w = w.to(tl.float32)
                total = tl.dot(x, tl.trans(w), total, input_precision="ieee")
            if HAS_BIAS:
                biases = bias_ptr + wide_expert * hidden + outputs
                total += tl.load(biases, mask=inside, other=0.0).to(tl.float32)[None, :]
            places = slots.to(tl.int64)[:, None] * hidden + outputs[None, :]
            mask = real[:, None] & inside[None, :]
            tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)

    @triton.jit
    def _combine_kernel(
        found_ptr,
        weights_ptr,
        out_ptr,
        hidden,
        TOPK: tl.constexpr,
        BLOCK: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        """Token -> the sum of its slots by their weights, in float32, one after the other."""
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < hidden
        total = tl.zeros([BLOCK], tl.float32)
        for place in range(TOPK):
            slot = token * TOPK + place
            found = tl.load(found_ptr + slot * hidden + columns, mask=inside, other=0.0)
            total += found.to(tl.float32) * tl.load(weights_ptr + slot)
        tl.store(
            out_ptr + token * hidden + columns, total.to(out_ptr.dtype.element_ty), mask=inside
        )


@dataclass(frozen=True)
class Tiles:
    """Slots, outputs and inputs of a tile, and the warps that work at it."""

    rows: int
    outputs: int
    columns: int
    warps: int


def tiles_of(slots_each: float, wide: bool) -> Tiles:
    """The tiles where an expert has `slots_each` slots on average; `wide`: of float32.

    Few slots are as slow as the weights come in: small tiles, and many of them.
    """
    columns = 32 if wide else 64
    if slots_each <= 16:
        return Tiles(16, 64, columns * 2, 4)
    if slots_each <= 64:
        return Tiles(32, 64, columns, 4)
    return Tiles(64, 64, columns, 4) if wide else Tiles(128, 64, columns, 8)


FIXED = Tiles(16, 64, 64, 4)
"""With kernel.batch_invariant: what a row adds up, and in which order, is the same in any batch."""


def _run(
    hidden_states: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str,
    w13_bias: Tensor | None,
    w2_bias: Tensor | None,
    tiles: Tiles,
) -> Tensor:
    assert activation in ACTIVATIONS and w13.is_contiguous() and w2.is_contiguous()
    x = hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous()
    (tokens, hidden), topk = x.shape, topk_ids.shape[1]
    experts, inner, slots = len(w13), w2.shape[2], tokens * topk
    out = torch.empty((tokens, hidden), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    places = torch.empty(slots, dtype=torch.int32, device=x.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    between = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
    found = torch.empty((slots, hidden), dtype=x.dtype, device=x.device)
    launch = after_the_last(x.device)
    block = min(max(triton.next_power_of_2(slots), 16), 1024)
    _sort_kernel[(experts,)](
        topk_ids.contiguous(), places, starts, slots, BLOCK=block, num_warps=4, **launch
    )
    most = min(slots, triton.cdiv(slots, tiles.rows) + experts)
    cut = {
        "EXPERTS": experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(experts),
        "ROWS": tiles.rows,
        "OUTPUTS": tiles.outputs,
        "WIDE": x.device.type == "cpu",
        "num_warps": tiles.warps,
        "num_stages": 3,
        **launch,
    }
    _gate_up_kernel[(triton.cdiv(inner, tiles.outputs), most)](
        x,
        x.stride(0),
        w13,
        w13 if w13_bias is None else w13_bias,
        places,
        starts,
        between,
        inner,
        INPUTS=hidden,
        TOPK=topk,
        COLUMNS=_columns(hidden, tiles),
        ACTIVATION=activation,
        HAS_BIAS=w13_bias is not None,
        **cut,
    )
    _down_kernel[(triton.cdiv(hidden, tiles.outputs), most)](
        between,
        w2,
        w2 if w2_bias is None else w2_bias,
        places,
        starts,
        found,
        hidden,
        INPUTS=inner,
        COLUMNS=_columns(inner, tiles),
        HAS_BIAS=w2_bias is not None,
        **cut,
    )
    block = min(triton.next_power_of_2(hidden), 1024)
    _combine_kernel[(tokens, triton.cdiv(hidden, block))](
        found, topk_weights.contiguous(), out, hidden, TOPK=topk, BLOCK=block, **launch
    )
    return out


def _columns(inputs: int, tiles: Tiles) -> int:
    return min(tiles.columns, max(triton.next_power_of_2(inputs), 16))


@fused_experts.register_impl("triton", supported=SUPPORTED, supports=on_gpu)
def _fused_experts(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    given = (hidden_states, w13_weight, w2_weight, topk_weights, topk_ids)
    each = topk_ids.numel() / len(w13_weight)
    tiles = tiles_of(each, hidden_states.dtype == torch.float32)
    return _run(*given, activation, w13_bias, w2_bias, tiles)


def _in_fixed_tiles(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    given = (hidden_states, w13_weight, w2_weight, topk_weights, topk_ids)
    return _run(*given, activation, w13_bias, w2_bias, FIXED)


fused_experts.set_batch_invariant("triton", ("cuda",), _in_fixed_tiles)
