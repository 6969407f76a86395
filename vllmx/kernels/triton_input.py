# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/input_batch.py, block_table.py, buffer_utils.py @ v0.25.0
"""Triton kernels around the model: from request rows to a step's inputs, from logits to tokens.

All of them read what changes from step to step in device memory, so that a launch may be replayed
in a CUDA graph. Requests whose seq_len is 0 are padding: token 0, position 0, no slot, no output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

BLOCK = 1024
ARGMAX_COLUMNS = 4096
"""Logits that a program looks through."""


if SUPPORTED is True:

    @triton.jit(
        do_not_specialize=["count"],
        # Parts of one packed copy begin anywhere; a second kernel would be compiled under load.
        do_not_specialize_on_alignment=["places_ptr", "values_ptr"],
    )
    def _apply_writes_kernel(out_ptr, places_ptr, values_ptr, count, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < count
        places = tl.load(places_ptr + i, mask=inside, other=0)
        tl.store(out_ptr + places, tl.load(values_ptr + i, mask=inside, other=0), mask=inside)

    @triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["packet_ptr"])
    def _copy_packet_kernel(out_ptr, packet_ptr, count, BLOCK: tl.constexpr):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < count
        tl.store(out_ptr + i, tl.load(packet_ptr + i, mask=inside), mask=inside)

    @triton.jit
    def _prepare_inputs_kernel(
        rows_ptr,
        query_start_ptr,
        seq_lens_ptr,
        tokens_ptr,
        tokens_stride,
        table_ptr,
        table_stride,
        input_ids_ptr,
        positions_ptr,
        block_table_ptr,
        block_table_stride,
        slots_ptr,
        BLOCK_SIZE: tl.constexpr,
        WITH_TOKENS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0).to(tl.int64)
        start = tl.load(query_start_ptr + request)
        count = tl.load(query_start_ptr + request + 1) - start
        seq_len = tl.load(seq_lens_ptr + request)
        row = tl.load(rows_ptr + request).to(tl.int64)
        real = seq_len > 0
        computed = tl.where(real, seq_len - count, 0)
        table_row = table_ptr + row * table_stride
        for offset in range(0, count, BLOCK):
            i = offset + tl.arange(0, BLOCK)
            inside = i < count
            known = i < tl.where(real, count, 0)
            positions = tl.where(known, computed + i, 0)
            blocks = tl.load(table_row + positions // BLOCK_SIZE, mask=known, other=0)
            slots = blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
            tl.store(slots_ptr + start + i, tl.where(known, slots, -1), mask=inside)
            if WITH_TOKENS:
                tokens = tokens_ptr + row * tokens_stride + positions
                token_ids = tl.load(tokens, mask=known, other=0)
                tl.store(input_ids_ptr + start + i, token_ids, mask=inside)
                tl.store(positions_ptr + start + i, positions.to(tl.int64), mask=inside)
        num_blocks = tl.cdiv(seq_len, BLOCK_SIZE)
        out_row = block_table_ptr + request * block_table_stride
        for offset in range(0, num_blocks, BLOCK):
            i = offset + tl.arange(0, BLOCK)
            inside = i < num_blocks
            blocks = tl.load(table_row + i, mask=inside, other=0)
            tl.store(out_row + i, blocks, mask=inside)

    @triton.jit
    def _prepare_states_kernel(
        rows_ptr,
        query_start_ptr,
        seq_lens_ptr,
        num_reqs,
        table_ptr,
        table_stride,
        block_size,
        blocks_ptr,
        has_state_ptr,
        BLOCK: tl.constexpr,
    ):
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = i < num_reqs
        seq_lens = tl.load(seq_lens_ptr + i, mask=inside, other=0)
        starts = tl.load(query_start_ptr + i, mask=inside, other=0)
        ends = tl.load(query_start_ptr + i + 1, mask=inside, other=0)
        real = seq_lens > 0
        rows = tl.load(rows_ptr + i, mask=inside, other=0).to(tl.int64)
        places = table_ptr + rows * table_stride + (seq_lens - 1) // block_size
        tl.store(blocks_ptr + i, tl.load(places, mask=real, other=0), mask=inside)
        tl.store(has_state_ptr + i, seq_lens > ends - starts, mask=inside)

    @triton.jit
    def _argmax_kernel(
        logits_ptr, logits_stride, columns, best_ptr, place_ptr, COLUMNS: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        part = tl.program_id(1)
        parts = tl.num_programs(1)
        i = part * COLUMNS + tl.arange(0, COLUMNS)
        x = tl.load(logits_ptr + row * logits_stride + i, mask=i < columns, other=float("-inf"))
        x = x.to(tl.float32)
        best = tl.max(x, axis=0)
        # The first of equals; NaNs only leave the last place, which is one.
        place = tl.min(tl.where(x == best, i, columns - 1), axis=0)
        tl.store(best_ptr + row * parts + part, best)
        tl.store(place_ptr + row * parts + part, tl.minimum(place, columns - 1))

    @triton.jit
    def _commit_argmax_kernel(
        best_ptr,
        place_ptr,
        requests_ptr,
        rows_ptr,
        seq_lens_ptr,
        ring_slot_ptr,
        tokens_ptr,
        tokens_stride,
        max_len,
        ring_ptr,
        ring_stride,
        PARTS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        i = tl.program_id(0).to(tl.int64)
        parts = tl.arange(0, BLOCK)
        inside = parts < PARTS
        values = tl.load(best_ptr + i * PARTS + parts, mask=inside, other=float("-inf"))
        places = tl.load(place_ptr + i * PARTS + parts, mask=inside, other=2147483647)
        best = tl.max(values, axis=0)
        first = tl.load(place_ptr + i * PARTS)
        token_id = tl.min(tl.where(values == best, places, 2147483647), axis=0)
        token_id = tl.where(token_id == 2147483647, first, token_id)
        _store_token(
            i,
            token_id,
            requests_ptr,
            rows_ptr,
            seq_lens_ptr,
            ring_slot_ptr,
            tokens_ptr,
            tokens_stride,
            max_len,
            ring_ptr,
            ring_stride,
        )

    @triton.jit
    def _store_token(
        i,
        token_id,
        requests_ptr,
        rows_ptr,
        seq_lens_ptr,
        ring_slot_ptr,
        tokens_ptr,
        tokens_stride,
        max_len,
        ring_ptr,
        ring_stride,
    ):
        """Append the token to its request's row, and put it where the host will read it."""
        request = tl.load(requests_ptr + i)
        seq_len = tl.load(seq_lens_ptr + request)
        row = tl.load(rows_ptr + request).to(tl.int64)
        place = tokens_ptr + row * tokens_stride + seq_len
        tl.store(place, token_id, mask=(seq_len > 0) & (seq_len < max_len))
        slot = tl.load(ring_slot_ptr)
        tl.store(ring_ptr + slot * ring_stride + i, token_id)

    @triton.jit
    def _commit_tokens_kernel(
        sampled_ptr,
        requests_ptr,
        rows_ptr,
        seq_lens_ptr,
        ring_slot_ptr,
        tokens_ptr,
        tokens_stride,
        max_len,
        ring_ptr,
        ring_stride,
    ):
        i = tl.program_id(0).to(tl.int64)
        token_id = tl.load(sampled_ptr + i).to(tl.int32)
        _store_token(
            i,
            token_id,
            requests_ptr,
            rows_ptr,
            seq_lens_ptr,
            ring_slot_ptr,
            tokens_ptr,
            tokens_stride,
            max_len,
            ring_ptr,
            ring_stride,
        )


def apply_writes(out: Tensor, places: Tensor, values: Tensor) -> None:
    """out.view(-1)[places] = values; all int32, places [n] and values [n] distinct in place."""
    count = len(places)
    _apply_writes_kernel[(triton.cdiv(count, BLOCK),)](out, places, values, count, BLOCK=BLOCK)


def copy_packet(out: Tensor, packet: Tensor) -> None:
    """out[:n] = packet, int32 [n] in pinned memory of the host.

    A kernel where a copy would do: the copy engine and a graph after it wait for each other.
    """
    count = len(packet)
    _copy_packet_kernel[(triton.cdiv(count, BLOCK),)](out, packet, count, BLOCK=BLOCK)


def prepare_inputs(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    all_token_ids: Tensor,
    tables: list[Tensor],
    block_sizes: list[int],
    input_ids: Tensor,
    positions: Tensor,
    block_tables: list[Tensor],
    slot_mappings: list[Tensor],
) -> None:
    """Fill a step's inputs for the requests in `rows`, int32 [num_reqs].

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs], new tokens included.
    all_token_ids: int32 [max_num_reqs, max_model_len]; tables: int32 [max_num_reqs, max blocks], a
    KV cache group. Written: input_ids int32 and positions int64 [num_tokens]; for each group the
    requests' part of block_tables, int32 [num_reqs, max blocks], and slots, int64 [num_tokens].
    """
    groups = zip(tables, block_sizes, block_tables, slot_mappings, strict=True)
    for group, (table, block_size, block_table, slots) in enumerate(groups):
        _prepare_inputs_kernel[(len(rows),)](
            rows,
            query_start_loc,
            seq_lens,
            all_token_ids,
            all_token_ids.stride(0),
            table,
            table.stride(0),
            input_ids,
            positions,
            block_table,
            block_table.stride(0),
            slots,
            BLOCK_SIZE=block_size,
            WITH_TOKENS=group == 0,
            BLOCK=256,
        )


def prepare_states(
    rows: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    table: Tensor,
    block_size: int,
    blocks: Tensor,
    has_initial_state: Tensor,
) -> None:
    """Find the recurrent states of the requests in `rows`, int32 [num_reqs], in one group.

    table: int32 [max_num_reqs, max blocks] of `block_size` tokens. Written: `blocks`, int32
    [num_reqs, 1], the block of the last token, 0 for padding; `has_initial_state`, bool [num_reqs],
    whether tokens are computed. The rest is as in `prepare_inputs`.
    """
    count = len(rows)
    _prepare_states_kernel[(triton.cdiv(count, BLOCK),)](
        rows,
        query_start_loc,
        seq_lens,
        count,
        table,
        table.stride(0),
        block_size,
        blocks,
        has_initial_state,
        BLOCK=BLOCK,
    )


def sample_greedy(
    logits: Tensor,
    requests: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    ring_slot: Tensor,
    all_token_ids: Tensor,
    ring: Tensor,
) -> None:
    """The likeliest token of each row of logits [n, vocab], the first of equals, committed.

    See `commit_tokens`.
    """
    count, columns = logits.shape
    parts = triton.cdiv(columns, ARGMAX_COLUMNS)
    best = torch.empty((count, parts), dtype=torch.float32, device=logits.device)
    place = torch.empty((count, parts), dtype=torch.int32, device=logits.device)
    _argmax_kernel[(count, parts)](
        logits, logits.stride(0), columns, best, place, COLUMNS=ARGMAX_COLUMNS
    )
    _commit_argmax_kernel[(count,)](
        best,
        place,
        requests,
        rows,
        seq_lens,
        ring_slot,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        ring,
        ring.stride(0),
        PARTS=parts,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )


def commit_tokens(
    sampled: Tensor,
    requests: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    ring_slot: Tensor,
    all_token_ids: Tensor,
    ring: Tensor,
) -> None:
    """Append sampled tokens, int [n], to their requests, and copy them to ring[ring_slot].

    requests: int32 [n], the place of each in `rows` and `seq_lens`, int32 [num_reqs]; ring_slot:
    int32 [1]; ring: int32 [slots, max_num_reqs].
    """
    _commit_tokens_kernel[(len(sampled),)](
        sampled,
        requests,
        rows,
        seq_lens,
        ring_slot,
        all_token_ids,
        all_token_ids.stride(0),
        all_token_ids.shape[1],
        ring,
        ring.stride(0),
        num_warps=1,
    )
