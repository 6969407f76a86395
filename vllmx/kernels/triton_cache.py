# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of what writes the paged cache: keys and values alone, or all that comes
between the projection and attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.kv_cache import reshape_and_cache
from vllmx.ir.ops.qkv import qk_norm_rope_cache
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

HEADS = 16
"""Heads that a program norms, rotates and stores."""


def _whole_neox_heads(context: OpContext) -> bool | str:
    facts = context.facts
    if not facts.get("is_neox_style", True):
        return "rotates halves (NeoX style) only, not pairs"
    if facts.get("rotary_dim") != facts.get("head_size"):
        return f"rotates whole heads only, not {facts['rotary_dim']} of {facts['head_size']}"
    return on_gpu(context)


if SUPPORTED is True:

    @triton.jit
    def _narrow(x, pointer, scale, LIMIT: tl.constexpr):
        """x as what `pointer` stores; with a LIMIT, its largest number, x / scale is."""
        if LIMIT > 0:
            x = tl.div_rn(x.to(tl.float32), scale)
            x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
        return x.to(pointer.dtype.element_ty)

    @triton.jit
    def _reshape_and_cache_kernel(
        key_ptr,
        key_stride,
        value_ptr,
        value_stride,
        key_cache_ptr,
        value_cache_ptr,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        slots_ptr,
        key_scale,
        value_scale,
        BLOCK_SIZE: tl.constexpr,
        SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        LIMIT: tl.constexpr,
    ):
        token = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        columns = tl.arange(0, COLUMNS)
        inside = columns < tl.where(slot >= 0, SIZE, 0)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        key = tl.load(key_ptr + token * key_stride + columns, mask=inside, other=0.0)
        value = tl.load(value_ptr + token * value_stride + columns, mask=inside, other=0.0)
        to_key = key_cache_ptr + block * key_block_stride + place * key_slot_stride
        to_value = value_cache_ptr + block * value_block_stride + place * value_slot_stride
        tl.store(to_key + columns, _narrow(key, key_cache_ptr, key_scale, LIMIT), mask=inside)
        tl.store(
            to_value + columns, _narrow(value, value_cache_ptr, value_scale, LIMIT), mask=inside
        )

    @triton.jit
    def _qk_norm_rope_cache_kernel(
        qkv_ptr,
        qkv_stride,
        query_weight_ptr,
        key_weight_ptr,
        epsilon,
        positions_ptr,
        angles_ptr,
        key_cache_ptr,
        value_cache_ptr,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        slots_ptr,
        key_scale,
        value_scale,
        out_ptr,
        NUM_HEADS: tl.constexpr,
        NUM_KV_HEADS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        HEADS: tl.constexpr,
        HAS_WEIGHTS: tl.constexpr,
        LIMIT: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        token = tl.program_id(0).to(tl.int64)
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        i = tl.arange(0, COLUMNS)
        half: tl.constexpr = HEAD_SIZE // 2
        in_half = i < half
        is_query = heads < NUM_HEADS
        is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
        is_value = (heads >= NUM_HEADS + NUM_KV_HEADS) & (heads < NUM_HEADS + 2 * NUM_KV_HEADS)
        mask = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_half[None, :]
        places = qkv_ptr + token * qkv_stride + heads[:, None] * HEAD_SIZE + i[None, :]
        first = tl.load(places, mask=mask, other=0.0)
        second = tl.load(places + half, mask=mask, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)

        if HAS_WEIGHTS:
            square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / HEAD_SIZE
            factor = (1.0 / tl.sqrt(square + epsilon))[:, None]
            q1 = tl.load(query_weight_ptr + i, mask=in_half, other=0.0).to(tl.float32)
            q2 = tl.load(query_weight_ptr + half + i, mask=in_half, other=0.0).to(tl.float32)
            k1 = tl.load(key_weight_ptr + i, mask=in_half, other=0.0).to(tl.float32)
            k2 = tl.load(key_weight_ptr + half + i, mask=in_half, other=0.0).to(tl.float32)
            a *= factor * tl.where(is_query[:, None], q1[None, :], k1[None, :])
            b *= factor * tl.where(is_query[:, None], q2[None, :], k2[None, :])

        angles = angles_ptr + tl.load(positions_ptr + token).to(tl.int64) * HEAD_SIZE
        cos = tl.load(angles + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        sin = tl.load(angles + half + i, mask=in_half, other=0.0).to(tl.float32)[None, :]
        dtype = out_ptr.dtype.element_ty
        turned = (a * cos - b * sin).to(dtype)
        other = (b * cos + a * sin).to(dtype)

        to_query = out_ptr + (token * NUM_HEADS + heads[:, None]) * HEAD_SIZE + i[None, :]
        tl.store(to_query, turned, mask=is_query[:, None] & in_half[None, :])
        tl.store(to_query + half, other, mask=is_query[:, None] & in_half[None, :])
        slot = tl.load(slots_ptr + token).to(tl.int64)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        stored = (i < tl.where(slot >= 0, half, 0))[None, :]
        to_key = key_cache_ptr + block * key_block_stride + place * key_slot_stride
        to_key += (heads[:, None] - NUM_HEADS) * HEAD_SIZE + i[None, :]
        mask = is_key[:, None] & stored
        tl.store(to_key, _narrow(turned, key_cache_ptr, key_scale, LIMIT), mask=mask)
        tl.store(to_key + half, _narrow(other, key_cache_ptr, key_scale, LIMIT), mask=mask)
        to_value = value_cache_ptr + block * value_block_stride + place * value_slot_stride
        to_value += (heads[:, None] - NUM_HEADS - NUM_KV_HEADS) * HEAD_SIZE + i[None, :]
        mask = is_value[:, None] & stored
        tl.store(to_value, _narrow(first, value_cache_ptr, value_scale, LIMIT), mask=mask)
        tl.store(to_value + half, _narrow(second, value_cache_ptr, value_scale, LIMIT), mask=mask)


def _limit(cache: Tensor) -> float:
    """The largest number of a cache of one byte an element, else 0."""
    return torch.finfo(cache.dtype).max if cache.element_size() == 1 else 0.0


def _strides(key_cache: Tensor, value_cache: Tensor) -> tuple[int, int, int, int]:
    (key_block, key_slot), (value_block, value_slot) = (
        cache.stride()[:2] for cache in (key_cache, value_cache)
    )
    return key_block, key_slot, value_block, value_slot


@reshape_and_cache.register_impl(
    "triton", supported=SUPPORTED, supports=on_gpu, batch_invariant=("cuda",)
)
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    tokens, heads, head_size = key.shape
    _reshape_and_cache_kernel[(tokens,)](
        key,
        key.stride(0),
        value,
        value.stride(0),
        key_cache,
        value_cache,
        *_strides(key_cache, value_cache),
        slot_mapping,
        k_scale,
        v_scale,
        BLOCK_SIZE=key_cache.shape[1],
        SIZE=heads * head_size,
        COLUMNS=triton.next_power_of_2(heads * head_size),
        LIMIT=_limit(key_cache),
    )


@qk_norm_rope_cache.register_impl(
    "triton", supported=SUPPORTED, supports=_whole_neox_heads, batch_invariant=("cuda",)
)
def _qk_norm_rope_cache(
    qkv: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    is_neox_style: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    kv_heads, head_size = key_cache.shape[2:]
    tokens, width = qkv.shape
    num_heads = width // head_size - 2 * kv_heads
    out = torch.empty((tokens, num_heads * head_size), dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope_cache_kernel[(tokens, triton.cdiv(width // head_size, HEADS))](
        qkv,
        qkv.stride(0),
        qkv if query_weight is None else query_weight,
        qkv if key_weight is None else key_weight,
        epsilon,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        *_strides(key_cache, value_cache),
        slot_mapping,
        k_scale,
        v_scale,
        out,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=kv_heads,
        HEAD_SIZE=head_size,
        COLUMNS=triton.next_power_of_2(head_size // 2),
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=HEADS,
        HAS_WEIGHTS=query_weight is not None,
        LIMIT=_limit(key_cache),
        num_warps=4,
        **after_the_last(qkv.device),
    )
    return out
