# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of a decode step's attention: norms, rotation, cache write, attention, joined.

A program has one request, one key head with the query heads that share it, and one split of the
keys. It asks for its first keys and values before it waits for the projection: what stands in the
cache is of earlier steps. The new token's key and value come from the projection itself, in the
program whose split ends the request, which also stores them. The program that comes last joins the
splits. Heads are held as two halves, which is what the rotation turns.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.decode import qk_norm_rope_decode
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.triton_attention import num_splits, processors_of
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    from vllmx.kernels.triton_cache import _narrow

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

KEYS = 64
"""Keys that a program looks at together."""
PROGRAMS = 3
"""Programs of a multiprocessor that requests are split for."""
MAX_GROUP = 16
"""Query heads that may share a key head."""


def _whole_heads(context: OpContext) -> bool | str:
    if context.device != "cuda":
        return f"runs on a GPU, not on {context.device}"
    facts = context.facts
    head_size = facts.get("head_size", 128)
    if head_size not in (32, 64, 128, 256):
        return f"holds heads of 32, 64, 128 or 256 elements, not {head_size}"
    if facts.get("rotary_dim", head_size) != head_size:
        return f"rotates whole heads only, not {facts['rotary_dim']} of {head_size}"
    if not facts.get("is_neox_style", True):
        return "rotates halves (NeoX style) only, not pairs"
    if facts.get("group", 1) > MAX_GROUP:
        return f"takes at most {MAX_GROUP} query heads of a key head, not {facts['group']}"
    for name in ("sliding_window", "soft_cap"):
        if facts.get(name) is not None:
            return f"has no {name}"
    return True


if SUPPORTED is True:

    @triton.jit
    def _turned(
        a, b, size, weight_ptr, i, cos, sin, epsilon, HALF: tl.constexpr, NORM: tl.constexpr
    ):
        """Rows of two halves, normed and rotated, float32."""
        if NORM:
            square = (tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / size
            factor = (1.0 / tl.sqrt(square + epsilon))[:, None]
            a *= factor * tl.load(weight_ptr + i).to(tl.float32)[None, :]
            b *= factor * tl.load(weight_ptr + HALF + i).to(tl.float32)[None, :]
        return a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :]

    @triton.jit
    def _scored(q1, q2, k1, k2, WIDE: tl.constexpr):
        """q @ k.T, float32."""
        if WIDE:
            k1 = k1.to(tl.float32)
            k2 = k2.to(tl.float32)
        first = tl.dot(q1, tl.trans(k1.to(q1.dtype)), input_precision="ieee")
        return tl.dot(q2, tl.trans(k2.to(q2.dtype)), first, input_precision="ieee")

    @triton.jit
    def _weighted(weights, v, out, WIDE: tl.constexpr, COMPUTE: tl.constexpr):
        """out + weights @ v."""
        if WIDE:
            return tl.dot(weights, v.to(tl.float32), out, input_precision="ieee")
        return tl.dot(weights.to(COMPUTE), v.to(COMPUTE), out, input_precision="ieee")

    @triton.jit
    def _decode_step_kernel(
        qkv_ptr,
        qkv_stride,
        query_weight_ptr,
        key_weight_ptr,
        epsilon,
        positions_ptr,
        angles_ptr,
        key_ptr,
        value_ptr,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        slots_ptr,
        table_ptr,
        table_stride,
        seq_lens_ptr,
        out_ptr,
        part_ptr,
        weight_ptr,
        count_ptr,
        scale,
        key_scale,
        value_scale,
        NUM_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        HALF: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        KEYS: tl.constexpr,
        SPLITS: tl.constexpr,
        NORM: tl.constexpr,
        LIMIT: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        request = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        split = tl.program_id(2)
        num_kv_heads = tl.num_programs(1)
        head_size: tl.constexpr = 2 * HALF
        compute = qkv_ptr.dtype.element_ty
        rows = tl.arange(0, ROWS)
        i = tl.arange(0, HALF)
        in_group = rows < GROUP
        half = i[None, :]

        # Lengths, tables and older keys are of kernels that ended before the last one began.
        seq_len = tl.load(seq_lens_ptr + request)
        span = tl.cdiv(tl.cdiv(seq_len, KEYS), SPLITS) * KEYS
        first = split * span
        stop = tl.minimum(first + span, seq_len)
        active = tl.maximum(tl.cdiv(seq_len, tl.maximum(span, 1)), 1)
        ends = stop == seq_len
        past = tl.where(ends, seq_len - 1, stop)
        table_row = table_ptr + request * table_stride
        keys_of_head = key_ptr + kv_head * head_size + half
        values_of_head = value_ptr + kv_head * head_size + half
        places = first + tl.arange(0, KEYS)
        inside = places < past
        block = tl.load(table_row + places // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        offset = places % BLOCK_SIZE
        keys = keys_of_head + (block * key_block_stride + offset * key_slot_stride)[:, None]
        values = values_of_head + (block * value_block_stride + offset * value_slot_stride)[:, None]
        k1 = tl.load(keys, mask=inside[:, None], other=0.0)
        k2 = tl.load(keys + HALF, mask=inside[:, None], other=0.0)
        v1 = tl.load(values, mask=inside[:, None], other=0.0)
        v2 = tl.load(values + HALF, mask=inside[:, None], other=0.0)
        angles = angles_ptr + tl.load(positions_ptr + request).to(tl.int64) * head_size + i
        cos = tl.load(angles).to(tl.float32)
        sin = tl.load(angles + HALF).to(tl.float32)
        slot = tl.load(slots_ptr + request).to(tl.int64)
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

        if split < active:
            heads = kv_head * GROUP + rows
            mask = in_group[:, None] & (i < HALF)[None, :]
            of_query = qkv_ptr + request * qkv_stride + heads[:, None] * head_size + half
            a = tl.load(of_query, mask=mask, other=0.0).to(tl.float32)
            b = tl.load(of_query + HALF, mask=mask, other=0.0).to(tl.float32)
            one = tl.arange(0, 1)
            of_key = qkv_ptr + request * qkv_stride + (NUM_HEADS + kv_head) * head_size
            of_key += one[:, None] + half
            of_value = of_key + num_kv_heads * head_size
            key1 = tl.load(of_key).to(tl.float32)
            key2 = tl.load(of_key + HALF).to(tl.float32)
            value1 = tl.load(of_value)
            value2 = tl.load(of_value + HALF)
            q1, q2 = _turned(a, b, head_size, query_weight_ptr, i, cos, sin, epsilon, HALF, NORM)
            q1 = q1.to(compute)
            q2 = q2.to(compute)
            if WIDE:
                q1 = q1.to(tl.float32)
                q2 = q2.to(tl.float32)

            best = tl.full([ROWS], float("-inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            out1 = tl.zeros([ROWS, HALF], tl.float32)
            out2 = tl.zeros([ROWS, HALF], tl.float32)
            factor = scale * key_scale * 1.4426950408889634
            if first < past:
                scores = _scored(q1, q2, k1, k2, WIDE) * factor
                scores = tl.where(inside[None, :], scores, float("-inf"))
                best = tl.max(scores, axis=1)
                weights = tl.exp2(scores - best[:, None])
                total = tl.sum(weights, axis=1)
                out1 = _weighted(weights, v1, out1, WIDE, compute)
                out2 = _weighted(weights, v2, out2, WIDE, compute)
            for begin in range(first + KEYS, past, KEYS):
                places = begin + tl.arange(0, KEYS)
                inside = places < past
                block = tl.load(table_row + places // BLOCK_SIZE, mask=inside, other=0)
                block = block.to(tl.int64)
                offset = places % BLOCK_SIZE
                at_key = block * key_block_stride + offset * key_slot_stride
                at_value = block * value_block_stride + offset * value_slot_stride
                keys = keys_of_head + at_key[:, None]
                values = values_of_head + at_value[:, None]
                k1 = tl.load(keys, mask=inside[:, None], other=0.0)
                k2 = tl.load(keys + HALF, mask=inside[:, None], other=0.0)
                v1 = tl.load(values, mask=inside[:, None], other=0.0)
                v2 = tl.load(values + HALF, mask=inside[:, None], other=0.0)
                scores = _scored(q1, q2, k1, k2, WIDE) * factor
                scores = tl.where(inside[None, :], scores, float("-inf"))
                new_best = tl.maximum(best, tl.max(scores, axis=1))
                weights = tl.exp2(scores - new_best[:, None])
                shrink = tl.exp2(best - new_best)
                total = total * shrink + tl.sum(weights, axis=1)
                out1 = _weighted(weights, v1, out1 * shrink[:, None], WIDE, compute)
                out2 = _weighted(weights, v2, out2 * shrink[:, None], WIDE, compute)
                best = new_best

            if ends & (seq_len > 0):
                # The new token, which is in the cache for the steps after this one.
                n1, n2 = _turned(
                    key1, key2, head_size, key_weight_ptr, i, cos, sin, epsilon, HALF, NORM
                )
                n1 = _narrow(n1.to(compute), key_ptr, key_scale, LIMIT)
                n2 = _narrow(n2.to(compute), key_ptr, key_scale, LIMIT)
                w1 = _narrow(value1, value_ptr, value_scale, LIMIT)
                w2 = _narrow(value2, value_ptr, value_scale, LIMIT)
                if slot >= 0:
                    block_of = slot // BLOCK_SIZE
                    place = slot % BLOCK_SIZE
                    to_key = keys_of_head + block_of * key_block_stride + place * key_slot_stride
                    to_value = values_of_head + block_of * value_block_stride
                    to_value += place * value_slot_stride
                    tl.store(to_key, n1)
                    tl.store(to_key + HALF, n2)
                    tl.store(to_value, w1)
                    tl.store(to_value + HALF, w2)
                score = tl.sum(q1.to(tl.float32) * n1.to(tl.float32), axis=1)
                score += tl.sum(q2.to(tl.float32) * n2.to(tl.float32), axis=1)
                score *= factor
                new_best = tl.maximum(best, score)
                weight = tl.exp2(score - new_best)
                shrink = tl.exp2(best - new_best)
                total = total * shrink + weight
                out1 = out1 * shrink[:, None] + weight[:, None] * w1.to(tl.float32)
                out2 = out2 * shrink[:, None] + weight[:, None] * w2.to(tl.float32)
                best = new_best

            divisor = tl.where(total == 0.0, 1.0, total)
            out1 = out1 / divisor[:, None] * value_scale
            out2 = out2 / divisor[:, None] * value_scale
            row = request * NUM_HEADS + heads
            if active == 1:
                to_out = out_ptr + row[:, None] * head_size + half
                tl.store(to_out, out1.to(compute), mask=mask)
                tl.store(to_out + HALF, out2.to(compute), mask=mask)
            else:
                tl.store(weight_ptr + row * SPLITS + split, best + tl.log2(divisor), mask=in_group)
                to_part = part_ptr + (row[:, None] * SPLITS + split) * head_size + half
                tl.store(to_part, out1, mask=mask)
                tl.store(to_part + HALF, out2, mask=mask)
                tl.debug_barrier()
                counter = count_ptr + request * num_kv_heads + kv_head
                if tl.atomic_add(counter, 1, sem="acq_rel") == active - 1:
                    tl.store(counter, 0)
                    splits = tl.arange(0, SPLITS)
                    for g in tl.static_range(GROUP):
                        at = request * NUM_HEADS + kv_head * GROUP + g
                        seen = splits < active
                        logs = tl.load(
                            weight_ptr + at * SPLITS + splits,
                            mask=seen,
                            other=float("-inf"),
                            cache_modifier=".cg",
                        )
                        shares = tl.exp2(logs - tl.max(logs, axis=0))
                        shares /= tl.sum(shares, axis=0)
                        of_part = part_ptr + (at * SPLITS + splits)[:, None] * head_size + half
                        p1 = tl.load(of_part, mask=seen[:, None], other=0.0, cache_modifier=".cg")
                        p2 = tl.load(
                            of_part + HALF, mask=seen[:, None], other=0.0, cache_modifier=".cg"
                        )
                        to_out = out_ptr + at * head_size + i
                        tl.store(to_out, tl.sum(p1 * shares[:, None], axis=0).to(compute))
                        tl.store(to_out + HALF, tl.sum(p2 * shares[:, None], axis=0).to(compute))


@cache
def _counters(device: torch.device, number: int) -> Tensor:
    """Zeros, which every launch leaves as zeros."""
    return torch.zeros(number, dtype=torch.int32, device=device)


@qk_norm_rope_decode.register_impl("triton", supported=SUPPORTED, supports=_whole_heads)
def _qk_norm_rope_decode(
    qkv: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    epsilon: float,
    positions: Tensor,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    num_reqs, width = qkv.shape
    kv_heads, head_size = key_cache.shape[2:]
    num_heads = width // head_size - 2 * kv_heads
    group = num_heads // kv_heads
    device = qkv.device
    splits = num_splits(num_reqs * kv_heads, max_seq_len, PROGRAMS * processors_of(device))
    out = torch.empty((num_reqs, num_heads * head_size), dtype=qkv.dtype, device=device)
    part = weight = out
    counters = seq_lens
    if splits > 1:
        shape = (num_reqs * num_heads, splits)
        part = torch.empty((*shape, head_size), dtype=torch.float32, device=device)
        weight = torch.empty(shape, dtype=torch.float32, device=device)
        counters = _counters(device, num_reqs * kv_heads)
    limit = torch.finfo(key_cache.dtype).max if key_cache.element_size() == 1 else 0.0
    keys, stages = KEYS if head_size <= 128 else KEYS // 2, 1
    if num_reqs > 1 and qkv.element_size() == 2:
        # A request alone has its keys spread over programs enough; others wait for each other's.
        keys, stages = KEYS // 2, 4
    _decode_step_kernel[(num_reqs, kv_heads, splits)](
        qkv,
        qkv.stride(0),
        qkv if query_weight is None else query_weight,
        qkv if key_weight is None else key_weight,
        epsilon,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        slot_mapping,
        block_table,
        block_table.stride(0),
        seq_lens,
        out,
        part,
        weight,
        counters,
        scale,
        k_scale,
        v_scale,
        NUM_HEADS=num_heads,
        GROUP=group,
        ROWS=16,
        HALF=head_size // 2,
        BLOCK_SIZE=key_cache.shape[1],
        KEYS=keys,
        SPLITS=splits,
        NORM=query_weight is not None,
        LIMIT=limit,
        WIDE=device.type == "cpu",
        num_warps=4,
        num_stages=stages,
        **after_the_last(device),
    )
    return out
