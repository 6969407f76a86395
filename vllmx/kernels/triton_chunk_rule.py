# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fla/ops/chunk.py @ v0.25.0
"""Triton kernels of the gated delta rule over prompts, 64 tokens at a time.

The first works on all chunks at once: it inverts the triangular system of a chunk's corrections
(the WY form) and weighs queries with keys. The second goes from chunk to chunk with the state in
registers and is otherwise products of matrices. Queries and keys of 16 bits enter products as they
are; what they meet is float32 and enters as the sum of two numbers of their kind (`_product`), so
that a product errs by 2^-17 or less. Other products take TF32 three times: taken once, it cuts what
it is given, and a state that is always cut shrinks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.ir.ops.gated_delta_rule import CHUNK_SIZE, chunk_gated_delta_rule
from vllmx.kernels.triton_conv1d import find_tile
from vllmx.kernels.triton_delta_rule import STATE_ROWS, SUPPORTED, head_sizes, holds_heads
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl


if SUPPORTED is True:

    @triton.jit
    def _product(x, y, WIDE: tl.constexpr):
        """x @ y in float32, where x has a 16-bit dtype and y is float32."""
        if x.dtype == tl.float32:
            return tl.dot(x, y, input_precision="tf32x3")
        high = y.to(x.dtype)
        low = (y - high.to(tl.float32)).to(x.dtype)
        if WIDE:
            whole = x.to(tl.float32)
            found = tl.dot(whole, high.to(tl.float32))
            return found + tl.dot(whole, low.to(tl.float32))
        return tl.dot(x, low, acc=tl.dot(x, high))

    @triton.jit
    def _invert(system, CHUNK: tl.constexpr):
        """The inverse of I + system, float32 [64, 64], which is strictly lower triangular.

        The 16 x 16 blocks D on its diagonal are inverted row by row, all at once. With N, what is
        below them, I + system = D (I + M), M = D^-1 N, and M^4 = 0.
        """
        i = tl.arange(0, CHUNK)
        same = (i[:, None] // 16) == (i[None, :] // 16)
        row = tl.arange(0, 16)
        block = tl.arange(0, CHUNK // 16)
        of_block = block[:, None, None, None] == block[None, None, :, None]
        parts = tl.reshape(tl.where(same, system, 0.0), [CHUNK // 16, 16, CHUNK // 16, 16])
        parts = tl.sum(parts, axis=2)
        inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)[None, :, :]
        inverse = inverse + tl.zeros_like(parts)
        for n in range(1, 16):
            at = (row == n)[None, :, None]
            factors = tl.sum(tl.where(at, parts, 0.0), axis=1)
            known = tl.sum(factors[:, :, None] * inverse, axis=1)
            inverse = tl.where(at, inverse - known[:, None, :], inverse)
        inverse = tl.where(of_block, inverse[:, :, None, :], 0.0)
        inverse = tl.reshape(inverse, [CHUNK, CHUNK])
        below = tl.where(same, 0.0, system)
        once = tl.dot(inverse, below, input_precision="tf32x3")
        twice = tl.dot(once, once, input_precision="tf32x3")
        inverse += tl.dot(twice, inverse, input_precision="tf32x3")
        return inverse - tl.dot(once, inverse, input_precision="tf32x3")

    @triton.jit
    def _chunk_systems_kernel(
        q_ptr,
        k_ptr,
        g_ptr,
        beta_ptr,
        query_start_ptr,
        inverse_ptr,
        inside_ptr,
        from_start_ptr,
        to_end_ptr,
        num_reqs,
        scale,
        KEY_HEADS: tl.constexpr,
        VALUE_HEADS: tl.constexpr,
        KEY_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        CHUNK: tl.constexpr,
        REQUESTS: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        request, chunk = find_tile(query_start_ptr, tl.program_id(0), num_reqs, CHUNK, REQUESTS)
        if request >= num_reqs:
            return
        head = tl.program_id(1)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        begin = tl.load(query_start_ptr + request).to(tl.int64) + chunk * CHUNK
        stop = tl.load(query_start_ptr + request + 1).to(tl.int64)
        i = tl.arange(0, CHUNK)
        column = tl.arange(0, COLUMNS)
        token = begin + i
        there = token < stop
        mask = there[:, None] & (column < KEY_SIZE)[None, :]
        places = (token[:, None] * KEY_HEADS + key_head) * KEY_SIZE + column[None, :]
        q = tl.load(q_ptr + places, mask=mask, other=0.0)
        k = tl.load(k_ptr + places, mask=mask, other=0.0)
        gates = token * VALUE_HEADS + head
        g = tl.load(g_ptr + gates, mask=there, other=0.0)
        beta = tl.load(beta_ptr + gates, mask=there, other=0.0)

        # Double because of its differences, which are small where it is large.
        faded = tl.cumsum(g.to(tl.float64), 0)
        all_of_it = tl.sum(g.to(tl.float64), 0)
        tl.store(from_start_ptr + gates, tl.exp(faded.to(tl.float32)), mask=there)
        tl.store(to_end_ptr + gates, tl.exp((all_of_it - faded).to(tl.float32)), mask=there)
        between = (faded[:, None] - faded[None, :]).to(tl.float32)
        between = tl.exp(tl.where(i[:, None] >= i[None, :], between, float("-inf")))

        if WIDE:
            q, k = q.to(tl.float32), k.to(tl.float32)
        keys = tl.trans(k)
        inside = tl.dot(q, keys, input_precision="tf32x3") * between * scale
        system = tl.dot(k, keys, input_precision="tf32x3") * between * beta[:, None]
        system = tl.where(i[:, None] > i[None, :], system, 0.0)
        inverse = _invert(system, CHUNK)
        places = gates[:, None] * CHUNK + i[None, :]
        tl.store(inside_ptr + places, inside.to(inside_ptr.dtype.element_ty), mask=there[:, None])
        tl.store(inverse_ptr + places, inverse, mask=there[:, None])

    @triton.jit
    def _chunk_states_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        beta_ptr,
        inverse_ptr,
        inside_ptr,
        from_start_ptr,
        to_end_ptr,
        state_ptr,
        state_block_stride,
        blocks_ptr,
        blocks_stride,
        has_state_ptr,
        query_start_ptr,
        out_ptr,
        scale,
        KEY_HEADS: tl.constexpr,
        VALUE_HEADS: tl.constexpr,
        KEY_SIZE: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS: tl.constexpr,
        CHUNK: tl.constexpr,
        WIDE: tl.constexpr,
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head = tl.program_id(1)
        request = tl.program_id(2)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        block = tl.load(blocks_ptr + request * blocks_stride).to(tl.int64)
        # None of the state is read where the request begins.
        kept = KEY_SIZE * tl.load(has_state_ptr + request).to(tl.int32)
        first = tl.load(query_start_ptr + request).to(tl.int64)
        stop = tl.load(query_start_ptr + request + 1).to(tl.int64)
        in_rows = row < VALUE_SIZE
        column = tl.arange(0, COLUMNS)
        in_columns = column < KEY_SIZE
        i = tl.arange(0, CHUNK)
        # Transposed, [K, rows]: its products then have the many rows that tensor cores want.
        of_state = state_ptr + block * state_block_stride + head * VALUE_SIZE * KEY_SIZE
        of_state = of_state + row[None, :] * KEY_SIZE + column[:, None]
        in_state = in_columns[:, None] & in_rows[None, :]
        in_known = (column < kept)[:, None] & in_rows[None, :]
        state = tl.load(of_state, mask=in_known, other=0.0).to(tl.float32)

        for begin in range(first, stop, CHUNK):
            token = begin + i
            there = token < stop
            of_keys = (token[:, None] * KEY_HEADS + key_head) * KEY_SIZE + column[None, :]
            in_keys = there[:, None] & in_columns[None, :]
            q = tl.load(q_ptr + of_keys, mask=in_keys, other=0.0)
            k = tl.load(k_ptr + of_keys, mask=in_keys, other=0.0)
            gates = token * VALUE_HEADS + head
            of_values = gates[:, None] * VALUE_SIZE + row[None, :]
            in_values = there[:, None] & in_rows[None, :]
            v = tl.load(v_ptr + of_values, mask=in_values, other=0.0).to(tl.float32)
            beta = tl.load(beta_ptr + gates, mask=there, other=0.0)
            from_start = tl.load(from_start_ptr + gates, mask=there, other=0.0)
            to_end = tl.load(to_end_ptr + gates, mask=there, other=0.0)
            of_system = gates[:, None] * CHUNK + i[None, :]
            inverse = tl.load(inverse_ptr + of_system, mask=there[:, None], other=0.0)
            inside = tl.load(inside_ptr + of_system, mask=there[:, None], other=0.0)
            last = tl.minimum(begin + CHUNK, stop) - 1
            left = tl.load(from_start_ptr + last * VALUE_HEADS + head)

            told = _product(k, state, WIDE) * from_start[:, None]
            new = tl.dot(inverse, (v - told) * beta[:, None], input_precision="tf32x3")
            found = _product(q, state, WIDE) * (from_start * scale)[:, None]
            found += _product(inside, new, WIDE)
            tl.store(out_ptr + of_values, found.to(out_ptr.dtype.element_ty), mask=in_values)
            state = state * left + _product(tl.trans(k), new * to_end[:, None], WIDE)
        tl.store(of_state, state.to(state_ptr.dtype.element_ty), mask=in_state)


CHUNK_ROWS = 64
"""Rows of a head's matrix that a program has where activations have 16 bits."""


@chunk_gated_delta_rule.register_impl("triton", supported=SUPPORTED, supports=holds_heads)
def _chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    ssm_state: Tensor,
    state_indices: Tensor,
    has_initial_state: Tensor,
    query_start_loc: Tensor,
    scale: float,
) -> Tensor:
    q, k, v, g, beta = (x.contiguous() for x in (q, k, v, g, beta))
    tokens, heads = g.shape
    head_v, head_k = ssm_state.shape[2:]
    num_reqs = len(state_indices)
    sizes: dict[str, Any] = head_sizes(q.shape[1], heads, head_k, head_v)
    half = q.element_size() == 2
    # A product of matrices needs 16 of each. In 16 bits Triton 3.6's code for an H200 is wrong, and
    # reads outside of the tensors, with fewer than 128 columns or in one stage; of what is right,
    # 64 rows are the fastest (reports/gpu/lane.md).
    sizes["COLUMNS"] = max(sizes["COLUMNS"], 128 if half else 16)
    sizes["ROWS"] = max(min(triton.next_power_of_2(head_v), CHUNK_ROWS if half else STATE_ROWS), 16)
    wide = {"CHUNK": CHUNK_SIZE, "WIDE": q.device.type == "cpu"}
    of_all = {name: sizes[name] for name in ("KEY_HEADS", "VALUE_HEADS", "KEY_SIZE", "COLUMNS")}
    inverse = torch.empty((tokens, heads, CHUNK_SIZE), dtype=torch.float32, device=q.device)
    inside = torch.empty((tokens, heads, CHUNK_SIZE), dtype=q.dtype, device=q.device)
    from_start, to_end = torch.empty_like(g), torch.empty_like(g)
    _chunk_systems_kernel[(triton.cdiv(tokens, CHUNK_SIZE) + num_reqs, heads)](
        q,
        k,
        g,
        beta,
        query_start_loc,
        inverse,
        inside,
        from_start,
        to_end,
        num_reqs,
        scale,
        **of_all,
        **wide,
        REQUESTS=max(triton.next_power_of_2(num_reqs), 2),
        num_warps=4,
    )
    out = torch.empty_like(v)
    _chunk_states_kernel[(triton.cdiv(head_v, sizes["ROWS"]), heads, num_reqs)](
        q,
        k,
        v,
        beta,
        inverse,
        inside,
        from_start,
        to_end,
        ssm_state,
        ssm_state.stride(0),
        state_indices,
        state_indices.stride(0),
        has_initial_state.view(torch.uint8),
        query_start_loc,
        out,
        scale,
        **sizes,
        **wide,
        num_warps=4,
        num_stages=2 if half else 1,
    )
    return out
