# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over the paged cache for Hopper GPUs, written in Gluon, Triton's lower level.

The warps of a program have roles: two groups of four hold 64 rows each (tokens times the query
heads that share a key head) and take products and softmax, a third group brings keys and values to
shared memory ahead of them, page by page. A group asks for the scores of the next keys before it
takes the softmax of those it has, so that the tensor cores are at work meanwhile. What it computes,
in which precision, is what the prefill kernel of triton_attention.py does, which serves all that is
refused here. The interpreter doesn't know Gluon: tests/gpu and the goldens run it.
"""

from __future__ import annotations

import importlib
from functools import cache

import torch
from torch import Tensor

from vllmx.platform import has


def _lacks() -> str | None:
    """What the installed Triton lacks of Gluon, or None."""
    if not has("triton"):
        return "the package triton is not installed"
    try:
        importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")
    except ImportError as error:
        return f"this version of triton has no Gluon for Hopper ({error})"
    return None


LACKS = _lacks()
HEAD_SIZES = (64, 128)
ROWS = 128
"""Rows of a program, half of them each group's."""
KEYS = 128
STAGES = 2
"""Tiles of keys, and of values, in shared memory."""
REGISTERS = 216
"""Of a thread of the second group; the first gets as many, and the third what is left of 504."""


if LACKS is None:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import async_copy
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    # Renamed in the versions of Triton after 3.6.
    _async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
    _barrier = getattr(gl, "thread_barrier", None) or gl.barrier

    @gluon.jit
    def _blocks_of(
        table_row, key, stop, KEYS: gl.constexpr, PAGE: gl.constexpr, BLOCK_SIZE: gl.constexpr
    ):
        """The block of every `PAGE` of the keys from `key` on."""
        blocks = ()
        for i in gl.static_range(KEYS // PAGE):
            place = gl.minimum(key + PAGE * i, stop - 1)
            block = gl.load(table_row + place // BLOCK_SIZE)
            blocks = blocks + (block,)  # type: ignore[assignment] # noqa: RUF005
        return blocks

    @gluon.jit
    def _fill(
        shared,
        cache_ptr,
        blocks,
        key,
        stop,
        block_stride,
        slot_stride,
        KEYS: gl.constexpr,
        PAGE: gl.constexpr,
        HEAD_SIZE: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
    ):
        """Ask for the keys from `key` on; those from `stop` on are zero."""
        lanes: gl.constexpr = HEAD_SIZE // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
        rows = gl.arange(0, PAGE, layout=gl.SliceLayout(1, layout))
        columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, layout))
        offsets = (rows * slot_stride)[:, None] + columns[None, :]
        for i in gl.static_range(KEYS // PAGE):
            first = key + PAGE * i
            page = cache_ptr + blocks[i].to(gl.int64) * block_stride
            page += (first % BLOCK_SIZE) * slot_stride
            inside = (first + rows < stop)[:, None]
            _async_load(shared.slice(PAGE * i, PAGE), page + offsets, mask=inside)

    @gluon.jit
    def _bring(
        k_shared,
        v_shared,
        k_full,
        k_empty,
        v_full,
        v_empty,
        keys_ptr,
        values_ptr,
        table_row,
        stop,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        KEYS: gl.constexpr,
        PAGE: gl.constexpr,
        HEAD_SIZE: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """The third group's part."""
        number = 0
        for key in range(0, stop, KEYS):
            blocks = _blocks_of(table_row, key, stop, KEYS, PAGE, BLOCK_SIZE)
            stage = number % STAGES
            phase = (number // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _fill(
                k_shared.index(stage),
                keys_ptr,
                blocks,
                key,
                stop,
                key_block_stride,
                key_slot_stride,
                KEYS,
                PAGE,
                HEAD_SIZE,
                BLOCK_SIZE,
            )
            async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _fill(
                v_shared.index(stage),
                values_ptr,
                blocks,
                key,
                stop,
                value_block_stride,
                value_slot_stride,
                KEYS,
                PAGE,
                HEAD_SIZE,
                BLOCK_SIZE,
            )
            async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
            number += 1  # noqa: SIM113

    @gluon.jit
    def _soften(scores, best, total, factor, key, last, MASKED: gl.constexpr, KEYS: gl.constexpr):
        """One step of the online softmax, base 2: (weights, best, total, what to shrink by)."""
        if MASKED:
            layout: gl.constexpr = scores.type.layout
            places = key + gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
            scores = gl.where(places[None, :] <= last[:, None], scores, float("-inf"))
        new_best = gl.maximum(best, gl.max(scores, axis=1) * factor)
        safe = new_best
        if MASKED:
            # A row that sees none of these keys, and saw none before.
            safe = gl.where(new_best == float("-inf"), 0.0, new_best)
        weights = gl.exp2(scores * factor - safe[:, None])
        shrink = gl.exp2(best - safe)
        return weights, new_best, total * shrink + gl.sum(weights, axis=1), shrink

    @gluon.jit
    def _attend_step(
        q,
        k_shared,
        v_shared,
        k_full,
        k_empty,
        v_full,
        v_empty,
        p,
        out,
        best,
        total,
        factor,
        number,
        key,
        last,
        MASKED: gl.constexpr,
        KEYS: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """Scores of the keys at `key`, values of the tile before them: (p, out, best, total)."""
        o_layout: gl.constexpr = out.type.layout
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
        v_stage = number % STAGES
        v_phase = (number // STAGES) & 1
        k_stage = (number + 1) % STAGES
        k_phase = ((number + 1) // STAGES) & 1
        nothing = gl.zeros([64, KEYS], gl.float32, layout=s_layout)
        mbarrier.wait(k_full.index(k_stage), k_phase)
        fence_async_shared()
        k = k_shared.index(k_stage).permute((1, 0))
        scores_to_come = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(v_stage), v_phase)
        fence_async_shared()
        out_to_come = warpgroup_mma(p, v_shared.index(v_stage), out, is_async=True)
        scores = warpgroup_mma_wait(1, deps=(scores_to_come,))
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        weights, best, total, shrink = _soften(scores, best, total, factor, key, last, MASKED, KEYS)
        out, p = warpgroup_mma_wait(0, deps=(out_to_come, p))
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        out = out * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
        return gl.convert_layout(weights.to(q.dtype), p_layout), out, best, total

    @gluon.jit
    def _attend(
        HALF: gl.constexpr,
        q_shared,
        k_shared,
        v_shared,
        k_full,
        k_empty,
        v_full,
        v_empty,
        query_ptr,
        query_stride,
        out_ptr,
        start,
        first_token,
        num_tokens,
        past,
        stop,
        kv_head,
        num_heads,
        scale,
        value_scale,
        GROUP: gl.constexpr,
        KEYS: gl.constexpr,
        HEAD_SIZE: gl.constexpr,
        STAGES: gl.constexpr,
    ):
        """The first or the second group's part: rows 64 * HALF and on."""
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
        o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
        p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
        lanes: gl.constexpr = HEAD_SIZE // 8
        loaded: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
        q = q_shared.index(HALF)
        rows = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, loaded))
        columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, loaded))
        tokens = first_token + rows // GROUP
        places = (start + tokens).to(gl.int64) * query_stride
        places += (kv_head * GROUP + rows % GROUP) * HEAD_SIZE
        real = (tokens < num_tokens)[:, None]
        _async_load(q, query_ptr + places[:, None] + columns[None, :], mask=real)
        async_copy.commit_group()

        lowest = past + first_token + HALF * (64 // GROUP)
        last = lowest + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout)) // GROUP
        best = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, s_layout))
        out = gl.zeros([64, HEAD_SIZE], gl.float32, layout=o_layout)
        nothing = gl.zeros([64, KEYS], gl.float32, layout=s_layout)
        factor = scale * 1.4426950408889634
        async_copy.wait_group(0)
        fence_async_shared()
        _barrier()
        mbarrier.wait(k_full.index(0), 0)
        fence_async_shared()
        scores = warpgroup_mma(q, k_shared.index(0).permute((1, 0)), nothing, use_acc=False)
        mbarrier.arrive(k_empty.index(0), count=1)
        weights, best, total, _ = _soften(scores, best, total, factor, 0, last, True, KEYS)
        p = gl.convert_layout(weights.to(dtype), p_layout)

        # Up to here every row sees every key, and no mask is needed.
        whole = (lowest + 1) // KEYS * KEYS
        number = 0
        for key in range(KEYS, whole, KEYS):
            p, out, best, total = _attend_step(
                q,
                k_shared,
                v_shared,
                k_full,
                k_empty,
                v_full,
                v_empty,
                p,
                out,
                best,
                total,
                factor,
                number,
                key,
                last,
                False,
                KEYS,
                STAGES,
            )
            number += 1
        for key in range(gl.maximum(whole, KEYS), stop, KEYS):
            p, out, best, total = _attend_step(
                q,
                k_shared,
                v_shared,
                k_full,
                k_empty,
                v_full,
                v_empty,
                p,
                out,
                best,
                total,
                factor,
                number,
                key,
                last,
                True,
                KEYS,
                STAGES,
            )
            number += 1
        stage = number % STAGES
        mbarrier.wait(v_full.index(stage), (number // STAGES) & 1)
        fence_async_shared()
        out = warpgroup_mma(p, v_shared.index(stage), out)

        total = gl.convert_layout(total, gl.SliceLayout(1, o_layout))
        out = out / gl.where(total == 0.0, 1.0, total)[:, None] * value_scale
        rows = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, o_layout))
        columns = gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, o_layout))
        tokens = first_token + rows // GROUP
        places = (start + tokens).to(gl.int64) * num_heads + kv_head * GROUP + rows % GROUP
        to_out = out_ptr + (places * HEAD_SIZE)[:, None] + columns[None, :]
        gl.store(to_out, out.to(dtype), mask=(tokens < num_tokens)[:, None])

    @gluon.jit
    def _hopper_prefill_kernel(
        query_ptr,
        query_stride,
        key_ptr,
        value_ptr,
        key_block_stride,
        key_slot_stride,
        value_block_stride,
        value_slot_stride,
        table_ptr,
        table_stride,
        query_start_ptr,
        seq_lens_ptr,
        tile_ptr,
        out_ptr,
        scale,
        value_scale,
        GROUP: gl.constexpr,
        HEAD_SIZE: gl.constexpr,
        BLOCK_SIZE: gl.constexpr,
        KEYS: gl.constexpr,
        STAGES: gl.constexpr,
        REGISTERS: gl.constexpr,
    ):
        dtype: gl.constexpr = query_ptr.dtype.element_ty
        page: gl.constexpr = 16
        shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
        kv_head = gl.program_id(0)
        tile = gl.program_id(1)
        request = gl.load(tile_ptr + 2 * tile).to(gl.int64)
        first_token = gl.load(tile_ptr + 2 * tile + 1) + gl.program_id(2) * (128 // GROUP)
        if request < 0:
            return  # a graph has room for more tiles than this batch has
        start = gl.load(query_start_ptr + request)
        num_tokens = gl.load(query_start_ptr + request + 1) - start
        if first_token >= num_tokens:
            return
        past = gl.load(seq_lens_ptr + request) - num_tokens
        stop = past + gl.minimum(first_token + 128 // GROUP, num_tokens)

        q_shared = gl.allocate_shared_memory(dtype, [2, 64, HEAD_SIZE], shared)
        k_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], shared)
        v_shared = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], shared)
        barrier: gl.constexpr = mbarrier.MBarrierLayout()
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
        for i in gl.static_range(STAGES):
            # Every thread that loads tells when its part is there, each group when it is through.
            mbarrier.init(k_full.index(i), count=128)
            mbarrier.init(v_full.index(i), count=128)
            mbarrier.init(k_empty.index(i), count=2)
            mbarrier.init(v_empty.index(i), count=2)
        num_heads = gl.num_programs(0) * GROUP
        keys_ptr = key_ptr + kv_head * HEAD_SIZE
        values_ptr = value_ptr + kv_head * HEAD_SIZE
        table_row = table_ptr + request * table_stride
        gl.warp_specialize(
            [
                (
                    _attend,
                    (
                        0,
                        q_shared,
                        k_shared,
                        v_shared,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        query_ptr,
                        query_stride,
                        out_ptr,
                        start,
                        first_token,
                        num_tokens,
                        past,
                        stop,
                        kv_head,
                        num_heads,
                        scale,
                        value_scale,
                        GROUP,
                        KEYS,
                        HEAD_SIZE,
                        STAGES,
                    ),
                ),
                (
                    _attend,
                    (
                        1,
                        q_shared,
                        k_shared,
                        v_shared,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        query_ptr,
                        query_stride,
                        out_ptr,
                        start,
                        first_token,
                        num_tokens,
                        past,
                        stop,
                        kv_head,
                        num_heads,
                        scale,
                        value_scale,
                        GROUP,
                        KEYS,
                        HEAD_SIZE,
                        STAGES,
                    ),
                ),
                (
                    _bring,
                    (
                        k_shared,
                        v_shared,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                        keys_ptr,
                        values_ptr,
                        table_row,
                        stop,
                        key_block_stride,
                        key_slot_stride,
                        value_block_stride,
                        value_slot_stride,
                        KEYS,
                        page,
                        HEAD_SIZE,
                        BLOCK_SIZE,
                        STAGES,
                    ),
                ),
            ],
            [4, 4],
            [REGISTERS, 504 - 2 * REGISTERS],
        )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def hopper_takes(query: Tensor, key_cache: Tensor, value_cache: Tensor, tile_tokens: int) -> bool:
    """Whether `hopper_prefill` serves tiles of `tile_tokens` tokens; the arguments as its own."""
    group = query.shape[1] // key_cache.shape[2]
    strides = (query.stride(0), *key_cache.stride()[:2], *value_cache.stride()[:2])
    return (
        LACKS is None
        and _is_hopper(query.device)
        and query.element_size() == 2
        and query.dtype == key_cache.dtype
        and query.shape[2] in HEAD_SIZES
        and key_cache.shape[1] % 16 == 0
        and ROWS // 2 % group == 0
        and tile_tokens * group % ROWS == 0
        # Copies are of 16 bytes, which the compiler has to know.
        and all(stride % 16 == 0 for stride in strides)
        and all(t.data_ptr() % 16 == 0 for t in (query, key_cache, value_cache))
    )


def hopper_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tiles: Tensor,
    tile_tokens: int,
    out: Tensor,
    scale: float,
    v_scale: float,
) -> None:
    """Attention of the tokens of `tiles` into `out`, as `paged_prefill` of triton_attention.py.

    query, out: float16 or bfloat16 [num_tokens, num_heads, head_size]; the caches of its dtype;
    tiles: int32 [num_tiles, 2] of `tile_tokens` tokens each.
    """
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    _hopper_prefill_kernel[(num_kv_heads, len(tiles), tile_tokens * group // ROWS)](
        query,
        query.stride(0),
        key_cache,
        value_cache,
        key_cache.stride(0),
        key_cache.stride(1),
        value_cache.stride(0),
        value_cache.stride(1),
        block_table,
        block_table.stride(0),
        query_start_loc,
        seq_lens,
        tiles,
        out,
        scale,
        v_scale,
        GROUP=group,
        HEAD_SIZE=head_size,
        BLOCK_SIZE=key_cache.shape[1],
        KEYS=KEYS,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
    )
