# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fla/ops/fused_recurrent.py @ v0.25.0
"""Triton kernels of the gated delta rule token by token: its gates and norms, decode, recurrence.

A program has some rows of the matrix of one head and keeps them in registers, so that a decode
reads a state once and writes it once. All is float32 but what is loaded and stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.gated_delta_rule import (
    L2NORM_EPS,
    fused_post_conv_prep,
    fused_recurrent_gated_delta_rule_packed_decode,
    recurrent_gated_delta_rule,
)
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.kernels.triton_conv1d import in_rows
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

MAX_HEAD_SIZE = 256
PREP_TOKENS = 16
"""Tokens that a program of `fused_post_conv_prep` has, of one head."""
STATE_ROWS = 32
"""Rows of a head's matrix that a program has."""


def holds_heads(context: OpContext) -> bool | str:
    """A GPU, and heads whose rows a program can hold."""
    size = max(context.facts.get("head_k_dim", 0), context.facts.get("head_v_dim", 0))
    if size > MAX_HEAD_SIZE:
        return f"holds heads of at most {MAX_HEAD_SIZE} elements, not {size}"
    return on_gpu(context)


if SUPPORTED is True:

    @triton.jit
    def _gates(a, b, A_log, dt_bias):
        """(g, beta) in float32; softplus is its argument where that is beyond 20.

        Computed in double: a GPU's exp and division of float32 are off by several ulp, and there
        is one gate for a whole matrix.
        """
        x = (a.to(tl.float32) + dt_bias.to(tl.float32)).to(tl.float64)
        # log(1 + e^x) = max(x, 0) + log(1 + e^-|x|): the series where 1 + e^-|x| would lose it.
        small = tl.exp(-tl.abs(x))
        log1p = tl.where(small < 1e-6, small - 0.5 * small * small, tl.log(1.0 + small))
        softplus = tl.where(x > 20.0, x, tl.maximum(x, 0.0) + log1p)
        g = -tl.exp(A_log.to(tl.float64)) * softplus
        beta = 1.0 / (1.0 + tl.exp(-b.to(tl.float64)))
        return g.to(tl.float32), beta.to(tl.float32)

    @triton.jit
    def _step(state, q, k, v, g, beta):
        """One token: state [rows, K], q, k [K], v [rows], all float32: (state, out [rows]).

        The state's factor is taken in double: what it is off, a state is off again at each token.
        """
        state = state * tl.exp(g.to(tl.float64)).to(tl.float32)
        told = tl.sum(state * k[None, :], axis=1)
        state = state + ((v - told) * beta)[:, None] * k[None, :]
        return state, tl.sum(state * q[None, :], axis=1)

    @triton.jit
    def _prep_kernel(
        mixed_ptr,
        mixed_stride,
        a_ptr,
        a_stride,
        b_ptr,
        b_stride,
        A_log_ptr,
        dt_bias_ptr,
        q_ptr,
        k_ptr,
        v_ptr,
        g_ptr,
        beta_ptr,
        tokens,
        epsilon,
        KEY_HEADS: tl.constexpr,
        VALUE_HEADS: tl.constexpr,
        KEY_SIZE: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        TOKENS: tl.constexpr,
    ):
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        part = tl.program_id(1)
        there = token < tokens
        column = tl.arange(0, COLUMNS)
        if part < 2 * KEY_HEADS:
            mask = there[:, None] & (column < KEY_SIZE)[None, :]
            place = part * KEY_SIZE + column
            x = tl.load(
                mixed_ptr + token[:, None] * mixed_stride + place[None, :], mask=mask, other=0.0
            ).to(tl.float32)
            x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) + epsilon))[:, None]
            head = part % KEY_HEADS
            places = (token[:, None] * KEY_HEADS + head) * KEY_SIZE + column[None, :]
            if part < KEY_HEADS:
                tl.store(q_ptr + places, x.to(q_ptr.dtype.element_ty), mask=mask)
            else:
                tl.store(k_ptr + places, x.to(k_ptr.dtype.element_ty), mask=mask)
        else:
            head = part - 2 * KEY_HEADS
            mask = there[:, None] & (column < VALUE_SIZE)[None, :]
            place = 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + column
            value = tl.load(
                mixed_ptr + token[:, None] * mixed_stride + place[None, :], mask=mask, other=0.0
            )
            places = (token[:, None] * VALUE_HEADS + head) * VALUE_SIZE + column[None, :]
            tl.store(v_ptr + places, value, mask=mask)
            g, beta = _gates(
                tl.load(a_ptr + token * a_stride + head, mask=there, other=0.0),
                tl.load(b_ptr + token * b_stride + head, mask=there, other=0.0),
                tl.load(A_log_ptr + head),
                tl.load(dt_bias_ptr + head),
            )
            tl.store(g_ptr + token * VALUE_HEADS + head, g, mask=there)
            tl.store(beta_ptr + token * VALUE_HEADS + head, beta, mask=there)

    @triton.jit
    def _packed_decode_kernel(
        mixed_ptr,
        mixed_stride,
        a_ptr,
        a_stride,
        b_ptr,
        b_stride,
        A_log_ptr,
        dt_bias_ptr,
        state_ptr,
        state_block_stride,
        blocks_ptr,
        blocks_stride,
        out_ptr,
        scale,
        epsilon,
        KEY_HEADS: tl.constexpr,
        VALUE_HEADS: tl.constexpr,
        KEY_SIZE: tl.constexpr,
        VALUE_SIZE: tl.constexpr,
        COLUMNS: tl.constexpr,
        ROWS: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head = tl.program_id(1)
        request = tl.program_id(2).to(tl.int64)
        block = tl.load(blocks_ptr + request * blocks_stride).to(tl.int64)
        dtype = mixed_ptr.dtype.element_ty
        in_rows = row < VALUE_SIZE
        out = out_ptr + (request * VALUE_HEADS + head) * VALUE_SIZE + row
        if block <= 0:
            tl.store(out, tl.zeros([ROWS], dtype), mask=in_rows)
            return
        column = tl.arange(0, COLUMNS)
        in_columns = column < KEY_SIZE
        mask = in_rows[:, None] & in_columns[None, :]
        places = state_ptr + block * state_block_stride + head * VALUE_SIZE * KEY_SIZE
        places += row[:, None] * KEY_SIZE + column[None, :]
        state = tl.load(places, mask=mask, other=0.0).to(tl.float32)

        mixed = mixed_ptr + request * mixed_stride
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        of_q = mixed + key_head * KEY_SIZE + column
        of_v = mixed + 2 * KEY_HEADS * KEY_SIZE + head * VALUE_SIZE + row
        q = tl.load(of_q, mask=in_columns, other=0.0).to(tl.float32)
        k = tl.load(of_q + KEY_HEADS * KEY_SIZE, mask=in_columns, other=0.0).to(tl.float32)
        v = tl.load(of_v, mask=in_rows, other=0.0).to(tl.float32)
        q = q * (1.0 / tl.sqrt(tl.sum(q * q, axis=0) + epsilon)) * scale
        k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + epsilon))
        g, beta = _gates(
            tl.load(a_ptr + request * a_stride + head),
            tl.load(b_ptr + request * b_stride + head),
            tl.load(A_log_ptr + head),
            tl.load(dt_bias_ptr + head),
        )
        beta = beta.to(b_ptr.dtype.element_ty).to(tl.float32)
        state, found = _step(state, q, k, v, g, beta)
        tl.store(places, state.to(state_ptr.dtype.element_ty), mask=mask)
        tl.store(out, found.to(dtype), mask=in_rows)

    @triton.jit
    def _recurrent_kernel(
        q_ptr,
        k_ptr,
        v_ptr,
        g_ptr,
        beta_ptr,
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
    ):
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        head = tl.program_id(1)
        request = tl.program_id(2)
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        block = tl.load(blocks_ptr + request * blocks_stride).to(tl.int64)
        # None of the state is read where the request begins.
        kept = KEY_SIZE * tl.load(has_state_ptr + request).to(tl.int32)
        begin = tl.load(query_start_ptr + request).to(tl.int64)
        stop = tl.load(query_start_ptr + request + 1).to(tl.int64)
        in_rows = row < VALUE_SIZE
        column = tl.arange(0, COLUMNS)
        in_columns = column < KEY_SIZE
        mask = in_rows[:, None] & in_columns[None, :]
        places = state_ptr + block * state_block_stride + head * VALUE_SIZE * KEY_SIZE
        places += row[:, None] * KEY_SIZE + column[None, :]
        in_known = in_rows[:, None] & (column < kept)[None, :]
        state = tl.load(places, mask=in_known, other=0.0).to(tl.float32)
        for token in range(begin, stop):
            of_key = (token * KEY_HEADS + key_head) * KEY_SIZE + column
            of_value = (token * VALUE_HEADS + head) * VALUE_SIZE + row
            gate = token * VALUE_HEADS + head
            q = tl.load(q_ptr + of_key, mask=in_columns, other=0.0).to(tl.float32) * scale
            k = tl.load(k_ptr + of_key, mask=in_columns, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + of_value, mask=in_rows, other=0.0).to(tl.float32)
            g, beta = tl.load(g_ptr + gate), tl.load(beta_ptr + gate)
            state, found = _step(state, q, k, v, g, beta)
            tl.store(out_ptr + of_value, found.to(out_ptr.dtype.element_ty), mask=in_rows)
        tl.store(places, state.to(state_ptr.dtype.element_ty), mask=mask)


OWN_HEADS: dict[str, Any] = {
    "supported": SUPPORTED,
    "supports": holds_heads,
    "batch_invariant": ("cuda",),
}
"""A program has one head of one request, or of some tokens that do not meet."""


@fused_post_conv_prep.register_impl("triton", **OWN_HEADS)
def _fused_post_conv_prep(
    conv_output: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    num_k_heads: int,
    head_k_dim: int,
    head_v_dim: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    mixed, a, b = in_rows(conv_output), in_rows(a), in_rows(b)
    tokens, heads = a.shape
    kind: dict[str, Any] = {"dtype": mixed.dtype, "device": mixed.device}
    q, k = (torch.empty((tokens, num_k_heads, head_k_dim), **kind) for _ in "qk")
    v = torch.empty((tokens, heads, head_v_dim), **kind)
    kind["dtype"] = torch.float32
    g, beta = (torch.empty((tokens, heads), **kind) for _ in "gb")
    _prep_kernel[(triton.cdiv(tokens, PREP_TOKENS), 2 * num_k_heads + heads)](
        mixed,
        mixed.stride(0),
        a,
        a.stride(0),
        b,
        b.stride(0),
        A_log,
        dt_bias,
        q,
        k,
        v,
        g,
        beta,
        tokens,
        L2NORM_EPS,
        KEY_HEADS=num_k_heads,
        VALUE_HEADS=heads,
        KEY_SIZE=head_k_dim,
        VALUE_SIZE=head_v_dim,
        COLUMNS=triton.next_power_of_2(max(head_k_dim, head_v_dim)),
        TOKENS=PREP_TOKENS,
    )
    return q, k, v, g, beta


def head_sizes(num_k_heads: int, heads: int, head_k: int, head_v: int) -> dict[str, int]:
    """What the kernels that hold rows of a matrix are compiled for."""
    return {
        "KEY_HEADS": num_k_heads,
        "VALUE_HEADS": heads,
        "KEY_SIZE": head_k,
        "VALUE_SIZE": head_v,
        "COLUMNS": triton.next_power_of_2(head_k),
        "ROWS": min(STATE_ROWS, triton.next_power_of_2(head_v)),
    }


@fused_recurrent_gated_delta_rule_packed_decode.register_impl("triton", **OWN_HEADS)
def _packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    ssm_state: Tensor,
    ssm_state_indices: Tensor,
) -> Tensor:
    mixed, a, b = in_rows(mixed_qkv), in_rows(a), in_rows(b)
    heads, head_v, head_k = ssm_state.shape[1:]
    num_k_heads = (mixed.shape[1] - heads * head_v) // (2 * head_k)
    sizes = head_sizes(num_k_heads, heads, head_k, head_v)
    out = torch.empty((len(mixed), heads, head_v), dtype=mixed.dtype, device=mixed.device)
    _packed_decode_kernel[(triton.cdiv(head_v, sizes["ROWS"]), heads, len(mixed))](
        mixed,
        mixed.stride(0),
        a,
        a.stride(0),
        b,
        b.stride(0),
        A_log,
        dt_bias,
        ssm_state,
        ssm_state.stride(0),
        ssm_state_indices,
        ssm_state_indices.stride(0),
        out,
        scale,
        L2NORM_EPS,
        **sizes,
        num_warps=4,
        **after_the_last(mixed.device),
    )
    return out


@recurrent_gated_delta_rule.register_impl("triton", **OWN_HEADS)
def _recurrent_gated_delta_rule(
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
    heads, head_v, head_k = ssm_state.shape[1:]
    sizes = head_sizes(q.shape[1], heads, head_k, head_v)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    _recurrent_kernel[(triton.cdiv(head_v, sizes["ROWS"]), heads, len(state_indices))](
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        g.contiguous(),
        beta.contiguous(),
        ssm_state,
        ssm_state.stride(0),
        state_indices,
        state_indices.stride(0),
        has_initial_state.view(torch.uint8),
        query_start_loc,
        out,
        scale,
        **sizes,
        num_warps=4,
    )
    return out
