# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of what parts queries from gates, norms heads and rotates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.qk_norm_gate import fused_qk_rmsnorm_rope_gate
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

MAX_HEAD = 8192
"""Longest head that one program holds in registers."""


def _holds_heads(context: OpContext) -> bool | str:
    head_size = context.facts.get("head_size", 0)
    if context.device == "cuda" and head_size > MAX_HEAD:
        return f"holds at most {MAX_HEAD} elements of a head, not {head_size}"
    return on_gpu(context)


if SUPPORTED is True:

    @triton.jit
    def _qk_norm_rope_gate_kernel(
        q_gate_ptr,
        q_gate_stride,
        k_ptr,
        k_stride,
        q_weight_ptr,
        k_weight_ptr,
        angles_ptr,
        positions_ptr,
        epsilon,
        q_out_ptr,
        k_out_ptr,
        gate_out_ptr,
        NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        ROTARY_DIM: tl.constexpr,
        COLUMNS: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        head = tl.program_id(1)
        is_query = head < NUM_HEADS
        if is_query:
            weight_ptr = q_weight_ptr
            source = q_gate_ptr + token * q_gate_stride + head * 2 * HEAD_SIZE
            target = q_out_ptr + (token * NUM_HEADS + head) * HEAD_SIZE
        else:
            weight_ptr = k_weight_ptr
            source = k_ptr + token * k_stride + (head - NUM_HEADS) * HEAD_SIZE
            target = k_out_ptr + (token * NUM_KV_HEADS + head - NUM_HEADS) * HEAD_SIZE

        half: tl.constexpr = ROTARY_DIM // 2
        i = tl.arange(0, COLUMNS)
        inside = i < HEAD_SIZE
        turns = i < ROTARY_DIM
        in_first = i < half
        other = tl.where(in_first, i + half, i - half)
        # No kernel before this one writes them: they come in while that one ends.
        weight = tl.load(weight_ptr + i, mask=inside, other=0.0).to(tl.float32)
        weight_of_other = tl.load(weight_ptr + other, mask=turns, other=0.0).to(tl.float32)
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        a = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(source + other, mask=turns, other=0.0).to(tl.float32)
        factor = 1.0 / tl.sqrt(tl.sum(a * a, axis=0) / HEAD_SIZE + epsilon)
        dtype = q_out_ptr.dtype.element_ty
        # The reference rounds what it norms to the activation dtype before it rotates.
        a = (a * factor * weight).to(dtype).to(tl.float32)
        b = (b * factor * weight_of_other).to(dtype).to(tl.float32)

        position = tl.load(positions_ptr + token).to(tl.int64)
        angles = angles_ptr + position * ROTARY_DIM + tl.where(in_first, i, other)
        cos = tl.load(angles, mask=turns, other=0.0).to(tl.float32)
        sin = tl.load(angles + half, mask=turns, other=0.0).to(tl.float32)
        turned = a * cos + tl.where(in_first, -b, b) * sin
        tl.store(target + i, tl.where(turns, turned, a).to(dtype), mask=inside)
        if is_query:
            gate = tl.load(source + HEAD_SIZE + i, mask=inside, other=0.0)
            to_gate = gate_out_ptr + (token * NUM_HEADS + head) * HEAD_SIZE
            tl.store(to_gate + i, gate, mask=inside)


@fused_qk_rmsnorm_rope_gate.register_impl(
    "triton", supported=SUPPORTED, supports=_holds_heads, batch_invariant=("cuda",)
)
def _fused_qk_rmsnorm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    head_size, tokens = len(q_weight), len(q_gate)
    num_heads, num_kv_heads = q_gate.shape[1] // (2 * head_size), k.shape[1] // head_size
    q_out = torch.empty((tokens, num_heads * head_size), dtype=q_gate.dtype, device=q_gate.device)
    gate_out = torch.empty_like(q_out)
    k_out = torch.empty((tokens, num_kv_heads * head_size), dtype=k.dtype, device=k.device)
    columns = triton.next_power_of_2(head_size)
    _qk_norm_rope_gate_kernel[(tokens, num_heads + num_kv_heads)](
        q_gate,
        q_gate.stride(0),
        k,
        k.stride(0),
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        epsilon,
        q_out,
        k_out,
        gate_out,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_SIZE=head_size,
        ROTARY_DIM=cos_sin_cache.shape[1],
        COLUMNS=columns,
        num_warps=min(max(columns // 64, 1), 8),
        **after_the_last(q_gate.device),
    )
    return q_out, k_out, gate_out
