# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/mamba/ops/causal_conv1d.py @ v0.25.0
"""Triton kernels of the short convolution before a recurrence.

Products are added oldest first in float32, as the definition adds them, so that a token's sum does
not depend on its neighbours nor on where a prompt is cut.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.ir.ops.causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

TOKENS = 32
"""Tokens that a program of a prompt has."""
CHANNELS = 128
"""Channels that a program has."""


if SUPPORTED is True:

    @triton.jit
    def find_tile(  # noqa: ANN201
        query_start_ptr, tile, num_reqs, TOKENS: tl.constexpr, REQUESTS: tl.constexpr
    ):
        """(request, number of the tile in it) where each request has as many tiles of `TOKENS`
        tokens as it fills or begins; the request is num_reqs for a tile after the last."""
        i = tl.arange(0, REQUESTS)
        there = i < num_reqs
        start = tl.load(query_start_ptr + i, mask=there, other=0)
        stop = tl.load(query_start_ptr + i + 1, mask=there, other=0)
        tiles = (stop - start + TOKENS - 1) // TOKENS
        ends = tl.cumsum(tiles, 0)
        before = there & (ends <= tile)
        request = tl.sum(before.to(tl.int32), 0)
        first = tl.sum(tl.where(before, tiles, 0), 0)
        return request, tile - first

    @triton.jit
    def _keep_last_inputs(
        of_x, x_stride, of_state, state_place_stride, real, length, oldest, WIDTH: tl.constexpr
    ):
        """Write the last WIDTH - 1 inputs of a request of `length` tokens, oldest first."""
        dtype = of_x.dtype.element_ty
        for i in tl.static_range(WIDTH - 1):
            place = length - (WIDTH - 1) + i
            if place >= 0:
                kept = tl.load(of_x + place.to(tl.int64) * x_stride, mask=real, other=0.0)
            elif place >= oldest:
                held = of_state + (place + WIDTH - 1) * state_place_stride
                kept = tl.load(held, mask=real, other=0.0).to(dtype)
            else:
                kept = tl.zeros(of_x.shape, dtype)
            tl.debug_barrier()
            kept = kept.to(of_state.dtype.element_ty)
            tl.store(of_state + i * state_place_stride, kept, mask=real)
            tl.debug_barrier()

    @triton.jit
    def _conv_prompts_kernel(
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        state_ptr,
        state_block_stride,
        state_channel_stride,
        state_place_stride,
        query_start_ptr,
        blocks_ptr,
        blocks_stride,
        has_state_ptr,
        out_ptr,
        num_reqs,
        channels,
        WIDTH: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        SILU: tl.constexpr,
        TOKENS: tl.constexpr,
        CHANNELS: tl.constexpr,
        REQUESTS: tl.constexpr,
    ):
        request, tile = find_tile(query_start_ptr, tl.program_id(0), num_reqs, TOKENS, REQUESTS)
        if request >= num_reqs:
            return
        begin = tl.load(query_start_ptr + request).to(tl.int64)
        length = (tl.load(query_start_ptr + request + 1) - begin).to(tl.int32)
        # The place of the oldest input that there is: before the request, if it goes on.
        oldest = -(WIDTH - 1) * tl.load(has_state_ptr + request).to(tl.int32)
        block = tl.load(blocks_ptr + request * blocks_stride).to(tl.int64)
        dtype = x_ptr.dtype.element_ty
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        real = channel < channels
        of_state = state_ptr + block * state_block_stride + channel * state_channel_stride
        of_x = x_ptr + begin * x_stride + channel

        token = (tile * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        total = tl.zeros([TOKENS, CHANNELS], tl.float32)
        for i in tl.static_range(WIDTH):
            place = token - (WIDTH - 1) + i
            new = (place >= 0) & (token < length)
            value = tl.load(
                of_x[None, :] + place[:, None] * x_stride,
                mask=new[:, None] & real[None, :],
                other=0.0,
            ).to(tl.float32)
            old = (place >= oldest) & (place < 0) & (token < length)
            before = tl.load(
                of_state[None, :] + (place[:, None] + WIDTH - 1) * state_place_stride,
                mask=old[:, None] & real[None, :],
                other=0.0,
            )
            value = tl.where(old[:, None], before.to(dtype).to(tl.float32), value)
            factor = tl.load(weight_ptr + channel * WIDTH + i, mask=real, other=0.0)
            total += value * factor.to(tl.float32)[None, :]
        if HAS_BIAS:
            bias = tl.load(bias_ptr + channel, mask=real, other=0.0)
            total += bias.to(tl.float32)[None, :]
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(
            out_ptr + (begin + token)[:, None] * channels + channel[None, :],
            total.to(dtype),
            mask=(token < length)[:, None] & real[None, :],
        )

        # The one program that reads the state also writes it, when all of it has been read.
        if tile == 0:
            _keep_last_inputs(
                of_x, x_stride, of_state, state_place_stride, real, length, oldest, WIDTH
            )

    @triton.jit
    def _conv_update_kernel(
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        state_ptr,
        state_block_stride,
        state_channel_stride,
        state_place_stride,
        blocks_ptr,
        blocks_stride,
        out_ptr,
        channels,
        WIDTH: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        SILU: tl.constexpr,
        CHANNELS: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        request = tl.program_id(0).to(tl.int64)
        channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        block = tl.load(blocks_ptr + request * blocks_stride).to(tl.int64)
        dtype = x_ptr.dtype.element_ty
        real = channel < channels
        out = out_ptr + request * channels + channel
        if block <= 0:
            tl.store(out, tl.zeros([CHANNELS], dtype), mask=real)
            return
        of_state = state_ptr + block * state_block_stride + channel * state_channel_stride
        total = tl.zeros([CHANNELS], tl.float32)
        for i in tl.static_range(WIDTH):
            # A channel is one thread's: it has read a place before it writes there.
            if i < WIDTH - 1:
                value = tl.load(of_state + i * state_place_stride, mask=real, other=0.0).to(dtype)
            else:
                value = tl.load(x_ptr + request * x_stride + channel, mask=real, other=0.0)
            if i > 0:
                kept = value.to(state_ptr.dtype.element_ty)
                tl.store(of_state + (i - 1) * state_place_stride, kept, mask=real)
            factor = tl.load(weight_ptr + channel * WIDTH + i, mask=real, other=0.0)
            total += value.to(tl.float32) * factor.to(tl.float32)
        if HAS_BIAS:
            total += tl.load(bias_ptr + channel, mask=real, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out, total.to(dtype), mask=real)


OWN_ROWS: dict[str, Any] = {
    "supported": SUPPORTED,
    "supports": on_gpu,
    "batch_invariant": ("cuda",),
}
"""What a token gives depends on itself and those before it, whoever computes them."""


def in_rows(x: Tensor) -> Tensor:
    """x, whose last dimension must lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


@causal_conv1d_fn.register_impl("triton", **OWN_ROWS)
def _causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_states: Tensor,
    query_start_loc: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    x = in_rows(x)
    tokens, channels = x.shape
    num_reqs = len(cache_indices)
    out = torch.empty((tokens, channels), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(tokens, TOKENS) + num_reqs, triton.cdiv(channels, CHANNELS))
    _conv_prompts_kernel[grid](
        x,
        x.stride(0),
        weight.contiguous(),
        x if bias is None else bias,
        conv_states,
        *conv_states.stride(),
        query_start_loc,
        cache_indices,
        cache_indices.stride(0),
        has_initial_state.view(torch.uint8),
        out,
        num_reqs,
        channels,
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
        REQUESTS=max(triton.next_power_of_2(num_reqs), 2),
    )
    return out


@causal_conv1d_update.register_impl("triton", **OWN_ROWS)
def _causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv_state_indices: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    x = in_rows(x)
    rows, channels = x.shape
    out = torch.empty((rows, channels), dtype=x.dtype, device=x.device)
    _conv_update_kernel[(rows, triton.cdiv(channels, CHANNELS))](
        x,
        x.stride(0),
        weight.contiguous(),
        x if bias is None else bias,
        conv_state,
        *conv_state.stride(),
        conv_state_indices,
        conv_state_indices.stride(0),
        out,
        channels,
        WIDTH=weight.shape[1],
        HAS_BIAS=bias is not None,
        SILU=activation == "silu",
        CHANNELS=CHANNELS,
        num_warps=4,
        **after_the_last(x.device),
    )
    return out
