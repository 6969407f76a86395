# SPDX-License-Identifier: Apache-2.0
"""Triton kernels of attention over the paged cache.

Decode, one new token a request: the rows of a program are the query heads that share a key head,
and the keys of a request are split over `SPLITS` programs, whose parts a second kernel joins. How
many keys there are is read on the device, so a launch may be replayed in a CUDA graph.

Prefill: the rows of a program are some new tokens of one request times the heads that share a key
head. Which tokens, is a list made on the host (`tokens_of_a_tile`).

Keys that are masked are never loaded: what no request has written may be NaN. Softmax is online,
in float32, base 2. In Triton's interpreter (`WIDE`) products are taken in float32 too.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.triton_hopper_attention import hopper_prefill, hopper_takes
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

LOG2_E = 1.4426950408889634
DECODE_KEYS = 64
"""Keys that a decode program looks at together."""
TILE_TOKENS = 64
"""New tokens of a prefill program, for each of the query heads that share its key head."""
MAX_TILE_ROWS = 256
"""Most rows of a prefill program, tokens times heads; fewer where they are wide."""
MAX_SPLITS = 32
INTERPRETED_PROCESSORS = 4
"""Multiprocessors that Triton's interpreter is taken to have: splits are then tested too."""


if SUPPORTED is True:

    @triton.jit
    def _load_keys(
        cache_ptr,
        table_row,
        positions,
        inside,
        block_stride,
        slot_stride,
        columns,
        in_head,
        BLOCK_SIZE: tl.constexpr,
        WHOLE_HEADS: tl.constexpr,
    ):
        """Rows of a cache at `positions` of one request; [positions, columns], zero outside."""
        block = tl.load(table_row + positions // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        rows = cache_ptr + block * block_stride + (positions % BLOCK_SIZE) * slot_stride
        pointers = rows[:, None] + columns[None, :]
        if WHOLE_HEADS:
            return tl.load(pointers, mask=inside[:, None], other=0.0)
        return tl.load(pointers, mask=inside[:, None] & in_head[None, :], other=0.0)

    @triton.jit
    def _scores(query, keys, scale, soft_cap, HAS_CAP: tl.constexpr, WIDE: tl.constexpr):
        """query @ keys.T, float32; scaled only if capped, as the softmax scales the others."""
        if WIDE:
            scores = tl.dot(query, tl.trans(keys.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee")
        if HAS_CAP:
            # tanh by its definition: 1 - 2 / (e^2x + 1), right at both ends.
            scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scale * scores / soft_cap) + 1.0))
        return scores

    @triton.jit
    def _factor(scale, HAS_CAP: tl.constexpr):
        """What makes an exponent of 2 of what `_scores` returns."""
        if HAS_CAP:
            return 1.4426950408889634
        return scale * 1.4426950408889634

    @triton.jit
    def _accumulate(
        best, total, out, scores, factor, values, WIDE: tl.constexpr, COMPUTE: tl.constexpr
    ):
        """One step of the online softmax. One multiplication and subtraction an element: the
        products wait for this."""
        new_best = tl.maximum(best, tl.max(scores, axis=1) * factor)
        # A row that has seen no key yet has -inf for its best, and -inf - -inf is NaN.
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores * factor - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(weights, axis=1)
        if WIDE:
            part = tl.dot(weights, values.to(tl.float32), input_precision="ieee")
            return new_best, total, out * shrink[:, None] + part
        out = tl.dot(
            weights.to(COMPUTE),
            values.to(COMPUTE),
            acc=out * shrink[:, None],
            input_precision="ieee",
        )
        return new_best, total, out

    @triton.jit
    def _begin_with_sinks(sink_ptrs, has_sink):
        """The softmax of rows that have seen their sink and no key: (best, total)."""
        sinks = tl.load(sink_ptrs, mask=has_sink, other=0.0).to(tl.float32) * 1.4426950408889634
        return tl.where(has_sink, sinks, float("-inf")), tl.where(has_sink, 1.0, 0.0)

    @triton.jit
    def _decode_kernel(
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
        seq_lens_ptr,
        out_ptr,
        part_ptr,
        weight_ptr,
        sinks_ptr,
        scale,
        value_scale,
        soft_cap,
        window,
        GROUP: tl.constexpr,
        ROWS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        KEYS: tl.constexpr,
        SPLITS: tl.constexpr,
        HAS_WINDOW: tl.constexpr,
        IN_CHUNKS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        request = tl.program_id(0).to(tl.int64)
        kv_head = tl.program_id(1)
        num_kv_heads = tl.num_programs(1)
        split = tl.program_id(2)
        compute = query_ptr.dtype.element_ty
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        in_head = columns < HEAD_SIZE
        in_group = rows < GROUP
        heads = kv_head * GROUP + rows
        mask = in_group[:, None] & in_head[None, :]

        seq_len = tl.load(seq_lens_ptr + request)
        start = 0
        if HAS_WINDOW:
            start = tl.maximum(seq_len - window, 0)
        if IN_CHUNKS:
            start = tl.maximum(seq_len - 1, 0) // window * window
        first, stop = start, seq_len
        if SPLITS > 1:
            steps = tl.cdiv(tl.cdiv(seq_len - start, KEYS), SPLITS)
            first = start + split * steps * KEYS
            stop = tl.minimum(first + steps * KEYS, seq_len)

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_SINKS:
            # Of a request's parts the first has it, which has keys if any has.
            has_sink = in_group & (rows >= split * ROWS) & (rows < (stop - first) * ROWS)
            best, total = _begin_with_sinks(sinks_ptr + heads, has_sink)
        if first < stop:
            places = heads[:, None] * HEAD_SIZE + columns[None, :]
            query = tl.load(query_ptr + request * query_stride + places, mask=mask, other=0.0)
            if WIDE:
                query = query.to(tl.float32)
            table_row = table_ptr + request * table_stride
            head_start = kv_head * HEAD_SIZE
            factor = _factor(scale, HAS_CAP)
            for begin in range(first, stop, KEYS):
                positions = begin + tl.arange(0, KEYS)
                inside = positions < stop
                keys = _load_keys(
                    key_ptr + head_start,
                    table_row,
                    positions,
                    inside,
                    key_block_stride,
                    key_slot_stride,
                    columns,
                    in_head,
                    BLOCK_SIZE,
                    HEAD_SIZE == COLUMNS,
                )
                values = _load_keys(
                    value_ptr + head_start,
                    table_row,
                    positions,
                    inside,
                    value_block_stride,
                    value_slot_stride,
                    columns,
                    in_head,
                    BLOCK_SIZE,
                    HEAD_SIZE == COLUMNS,
                )
                scores = _scores(query, keys, scale, soft_cap, HAS_CAP, WIDE)
                scores = tl.where(inside[None, :], scores, float("-inf"))
                best, total, out = _accumulate(
                    best, total, out, scores, factor, values, WIDE, compute
                )

        # A padding request has no keys: its output is zero.
        out = out / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
        row = request * num_kv_heads * GROUP + heads
        if SPLITS == 1:
            places = out_ptr + row[:, None] * HEAD_SIZE + columns[None, :]
            tl.store(places, out.to(compute), mask=mask)
        else:
            # Without keys the best is -inf, and so is the weight.
            weight = best + tl.log2(tl.where(total == 0.0, 1.0, total))
            tl.store(weight_ptr + row * SPLITS + split, weight, mask=in_group)
            if first < stop:
                places = (row[:, None] * SPLITS + split) * HEAD_SIZE + columns[None, :]
                tl.store(part_ptr + places, out, mask=mask)

    @triton.jit
    def _join_splits_kernel(
        part_ptr,
        weight_ptr,
        out_ptr,
        HEAD_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        SPLITS: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        splits = tl.arange(0, SPLITS)
        columns = tl.arange(0, COLUMNS)
        in_head = columns < HEAD_SIZE
        weights = tl.load(weight_ptr + row * SPLITS + splits)
        best = tl.max(weights, axis=0)
        # Parts without keys were not written.
        weights = tl.where(weights == float("-inf"), 0.0, tl.exp2(weights - best))
        seen = weights > 0.0
        places = (row * SPLITS + splits)[:, None] * HEAD_SIZE + columns[None, :]
        parts = tl.load(part_ptr + places, mask=seen[:, None] & in_head[None, :], other=0.0)
        total = tl.sum(weights, axis=0)
        out = tl.sum(parts * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
        place = out_ptr + row * HEAD_SIZE + columns
        tl.store(place, out.to(out_ptr.dtype.element_ty), mask=in_head)

    @triton.jit
    def _prefill_kernel(
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
        sinks_ptr,
        scale,
        value_scale,
        soft_cap,
        window,
        GROUP: tl.constexpr,
        TOKENS: tl.constexpr,
        ROWS: tl.constexpr,
        HEAD_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        BLOCK_SIZE: tl.constexpr,
        KEYS: tl.constexpr,
        HAS_WINDOW: tl.constexpr,
        IN_CHUNKS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_SINKS: tl.constexpr,
        MASKS_ALL: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        kv_head = tl.program_id(0)
        num_heads = tl.num_programs(0) * GROUP
        tile = tl.program_id(1)
        request = tl.load(tile_ptr + 2 * tile).to(tl.int64)
        if request < 0:
            return  # a graph has room for more tiles than this batch has
        first_token = tl.load(tile_ptr + 2 * tile + 1)
        compute = query_ptr.dtype.element_ty
        start = tl.load(query_start_ptr + request)
        num_tokens = tl.load(query_start_ptr + request + 1) - start
        seq_len = tl.load(seq_lens_ptr + request)

        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, COLUMNS)
        in_head = columns < HEAD_SIZE
        tokens = first_token + rows // GROUP
        heads = kv_head * GROUP + rows % GROUP
        meant = (tokens < num_tokens) & (rows < TOKENS * GROUP)
        mask = meant[:, None] & in_head[None, :]
        token_row = (start + tokens).to(tl.int64)
        places = token_row * query_stride + heads * HEAD_SIZE
        query = tl.load(query_ptr + places[:, None] + columns[None, :], mask=mask, other=0.0)
        if WIDE:
            query = query.to(tl.float32)

        # The last key that each row sees, and the span of keys that any row of the tile sees.
        past = seq_len - num_tokens
        last = past + tokens
        lowest = past + first_token
        stop = past + tl.minimum(first_token + TOKENS, num_tokens)
        begin = 0
        if HAS_WINDOW:
            begin = tl.maximum(lowest - window + 1, 0) // KEYS * KEYS
        if IN_CHUNKS:
            begin = lowest // window * window // KEYS * KEYS

        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, COLUMNS], tl.float32)
        if HAS_SINKS:
            best, total = _begin_with_sinks(sinks_ptr + heads, meant)
        table_row = table_ptr + request * table_stride
        head_start = kv_head * HEAD_SIZE
        factor = _factor(scale, HAS_CAP)
        # Up to here every row sees every key, and no mask is needed.
        whole = begin
        if not HAS_WINDOW and not IN_CHUNKS and not MASKS_ALL:
            whole = (lowest + 1) // KEYS * KEYS
            for key in range(0, whole, KEYS):
                positions = key + tl.arange(0, KEYS)
                block = tl.load(table_row + positions // BLOCK_SIZE).to(tl.int64)
                slot = positions % BLOCK_SIZE
                of_key = key_ptr + block * key_block_stride + slot * key_slot_stride
                of_value = value_ptr + block * value_block_stride + slot * value_slot_stride
                place = head_start + columns[None, :]
                if HEAD_SIZE == COLUMNS:
                    keys = tl.load(of_key[:, None] + place)
                    values = tl.load(of_value[:, None] + place)
                else:
                    keys = tl.load(of_key[:, None] + place, mask=in_head[None, :], other=0.0)
                    values = tl.load(of_value[:, None] + place, mask=in_head[None, :], other=0.0)
                scores = _scores(query, keys, scale, soft_cap, HAS_CAP, WIDE)
                best, total, out = _accumulate(
                    best, total, out, scores, factor, values, WIDE, compute
                )
        for key in range(whole, stop, KEYS):
            positions = key + tl.arange(0, KEYS)
            inside = positions < stop
            keys = _load_keys(
                key_ptr + head_start,
                table_row,
                positions,
                inside,
                key_block_stride,
                key_slot_stride,
                columns,
                in_head,
                BLOCK_SIZE,
                HEAD_SIZE == COLUMNS,
            )
            values = _load_keys(
                value_ptr + head_start,
                table_row,
                positions,
                inside,
                value_block_stride,
                value_slot_stride,
                columns,
                in_head,
                BLOCK_SIZE,
                HEAD_SIZE == COLUMNS,
            )
            seen = positions[None, :] <= last[:, None]
            if HAS_WINDOW:
                seen &= positions[None, :] > last[:, None] - window
            if IN_CHUNKS:
                seen &= positions[None, :] >= last[:, None] // window * window
            scores = _scores(query, keys, scale, soft_cap, HAS_CAP, WIDE)
            scores = tl.where(seen, scores, float("-inf"))
            best, total, out = _accumulate(best, total, out, scores, factor, values, WIDE, compute)

        out = out / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale
        places = token_row * num_heads * HEAD_SIZE + heads * HEAD_SIZE
        tl.store(out_ptr + places[:, None] + columns[None, :], out.to(compute), mask=mask)


@cache
def processors_of(device: torch.device) -> int:
    """Multiprocessors of a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_splits(programs: int, max_seq_len: int, enough: int) -> int:
    """Parts that each request's keys are split into: for `enough` programs, a power of two.

    programs: requests times key heads.
    """
    useful = max_seq_len // DECODE_KEYS
    splits = 1
    while splits < MAX_SPLITS and splits * 2 <= useful and splits * programs < enough:
        splits *= 2
    return splits


def _width(sliding_window: int | None, attention_chunk_size: int | None) -> int:
    """The number that says what a token sees; no model has layers with both."""
    assert sliding_window is None or attention_chunk_size is None
    return sliding_window or attention_chunk_size or 0


def tokens_of_a_tile(group: int, dtype: torch.dtype, head_size: int) -> int:
    """New tokens of a prefill program where `group` query heads of `dtype` share a key head.

    float32 has a quarter of the rows: its products are taken element by element.
    """
    most = MAX_TILE_ROWS if head_size <= 128 else MAX_TILE_ROWS // 2
    rows = min(TILE_TOKENS * group, most)
    return max((rows if dtype.itemsize == 2 else rows // 4) // group, 1)


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    v_scale: float,
    splits: int,
    sinks: Tensor | None = None,
    attention_chunk_size: int | None = None,
) -> None:
    """Attention of one new token a request into `out`, [num_reqs, num_heads, head_size] as `query`.

    scale has k_scale in it. Arguments otherwise as of the op `paged_attention`; a request of
    length 0 is padding.
    """
    num_reqs, num_heads, head_size = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    columns = max(triton.next_power_of_2(head_size), 16)
    device = query.device
    part = weight = out
    if splits > 1:
        shape = (num_reqs * num_heads, splits)
        part = torch.empty((*shape, head_size), dtype=torch.float32, device=device)
        weight = torch.empty(shape, dtype=torch.float32, device=device)
    keys, warps, stages = DECODE_KEYS if columns <= 128 else DECODE_KEYS // 2, 4, 2
    if query.element_size() != 2:
        stages = 1
    elif splits == 1 and columns <= 128:
        # Enough programs for the device: small ones, whose loads are many at a time.
        keys, warps, stages = 16, 2, 5
    _decode_kernel[(num_reqs, num_kv_heads, splits)](
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
        seq_lens,
        out,
        part,
        weight,
        out if sinks is None else sinks,
        scale,
        v_scale,
        soft_cap or 0.0,
        _width(sliding_window, attention_chunk_size),
        GROUP=group,
        ROWS=max(triton.next_power_of_2(group), 16),
        HEAD_SIZE=head_size,
        COLUMNS=columns,
        BLOCK_SIZE=key_cache.shape[1],
        KEYS=keys,
        SPLITS=splits,
        HAS_WINDOW=sliding_window is not None,
        IN_CHUNKS=attention_chunk_size is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        WIDE=device.type == "cpu",
        num_warps=warps,
        num_stages=stages,
        **after_the_last(device),
    )
    if splits > 1:
        _join_splits_kernel[(num_reqs * num_heads,)](
            part,
            weight,
            out,
            HEAD_SIZE=head_size,
            COLUMNS=columns,
            SPLITS=splits,
            num_warps=2,
            **after_the_last(device),
        )


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    tiles: Tensor,
    out: Tensor,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    v_scale: float,
    masks_all: bool = False,
    sinks: Tensor | None = None,
    attention_chunk_size: int | None = None,
) -> None:
    """Attention of the tokens of `tiles` into `out`, [num_tokens, num_heads, head_size] as `query`.

    tiles: int32 [num_tiles, 2], a request and the first of its new tokens, or a negative number;
    each tile covers `tokens_of_a_tile` tokens. scale has k_scale in it. masks_all: treat keys that
    every token of a tile sees as all others, so that it does not matter which tokens share a tile.
    """
    num_heads, head_size = query.shape[1:]
    num_kv_heads = key_cache.shape[2]
    group = num_heads // num_kv_heads
    columns = max(triton.next_power_of_2(head_size), 16)
    tokens = tokens_of_a_tile(group, query.dtype, head_size)
    special = (sliding_window, soft_cap, sinks, attention_chunk_size)
    plain = not masks_all and all(asked is None for asked in special)
    if plain and hopper_takes(query, key_cache, value_cache, tokens):
        paged = (query, key_cache, value_cache, block_table, query_start_loc, seq_lens)
        hopper_prefill(*paged, tiles, tokens, out, scale, v_scale)
        return
    rows = max(triton.next_power_of_2(tokens * group), 16)
    small = query.element_size() == 2 and columns <= 128
    # The fastest on an H200 of those tried (reports/gpu/attention.md).
    keys, warps, stages = 32, 8, 1
    if small:
        keys, warps, stages = (64, 8, 3) if rows > 128 else (32, 4 if rows <= 64 else 8, 2)
    _prefill_kernel[(num_kv_heads, len(tiles))](
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
        out if sinks is None else sinks,
        scale,
        v_scale,
        soft_cap or 0.0,
        _width(sliding_window, attention_chunk_size),
        GROUP=group,
        TOKENS=tokens,
        ROWS=rows,
        HEAD_SIZE=head_size,
        COLUMNS=columns,
        BLOCK_SIZE=key_cache.shape[1],
        KEYS=keys,
        HAS_WINDOW=sliding_window is not None,
        IN_CHUNKS=attention_chunk_size is not None,
        HAS_CAP=soft_cap is not None,
        HAS_SINKS=sinks is not None,
        MASKS_ALL=masks_all,
        WIDE=query.device.type == "cpu",
        num_warps=warps,
        num_stages=stages,
    )
