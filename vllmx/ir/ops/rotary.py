# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/rotary_embedding/{base,common}.py @ v0.25.0
"""Rotary position embedding."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op


@register_op(static_args=("cos_sin_cache",))
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate the first rotary_dim elements of every head by its token's angles.

    positions: int64 [num_tokens]; query, key: [num_tokens, heads * head_size] or
    [num_tokens, heads, head_size]; cos_sin_cache: [max_position, rotary_dim], cosines in the first
    half, sines in the second. is_neox_style pairs element i with i + rotary_dim / 2, otherwise
    2 i with 2 i + 1. Computed in the cache's dtype, returned in the inputs' shapes and dtypes.
    """
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    rotated = _rotate(query, cos, sin, head_size, is_neox_style)
    return rotated, None if key is None else _rotate(key, cos, sin, head_size, is_neox_style)


@register_op
def mrotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    mrope_section: list[int],
    mrope_interleaved: bool = False,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """As `rotary_embedding`, but a token has a place in time, in height and in width.

    positions: int64 [3, num_tokens]; mrope_section: how many of the rotary_dim / 2 angles go by
    each of the three, one run after another. mrope_interleaved: they take turns, angle i goes by
    i % 3 while i is within three times the section of height or of width, and else by time.
    """
    rows = cos_sin_cache[positions].unflatten(-1, (2, -1))
    chosen = rows[0].clone()
    for axis, angles in sections(mrope_section, mrope_interleaved).items():
        chosen[..., angles] = rows[axis, ..., angles]
    cos, sin = chosen.unsqueeze(1).unbind(-2)
    rotated = _rotate(query, cos, sin, head_size, is_neox_style)
    return rotated, None if key is None else _rotate(key, cos, sin, head_size, is_neox_style)


def sections(mrope_section: list[int], interleaved: bool) -> dict[int, slice]:
    """Which angles go by height (1) and by width (2); the others go by time."""
    time, height, width = mrope_section
    if interleaved:
        return {1: slice(1, 3 * height, 3), 2: slice(2, 3 * width, 3)}
    return {1: slice(time, time + height), 2: slice(time + height, time + height + width)}


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox_style: bool) -> Tensor:
    heads = x.reshape(x.shape[0], -1, head_size)
    rotary_dim = 2 * cos.shape[-1]
    turned = heads[..., :rotary_dim].to(cos.dtype)
    if is_neox_style:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned = torch.stack(pairs, dim=-1).flatten(-2)
    out = torch.cat((turned.to(x.dtype), heads[..., rotary_dim:]), dim=-1)
    return out.view(x.shape)


rotary_embedding.set_batch_invariant(REFERENCE, ANY_DEVICE)
mrotary_embedding.set_batch_invariant(REFERENCE, ANY_DEVICE)


@rotary_embedding.register_facts
def _rotary_facts(
    head_size: int, cos_sin_cache: Tensor, is_neox_style: bool, **others: Any
) -> dict[str, Any]:
    return {
        "head_size": head_size,
        "rotary_dim": cos_sin_cache.shape[-1],
        "is_neox_style": is_neox_style,
    }


@rotary_embedding.register_inputs
def _rotary_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, heads, kv_heads, head_size, rotary_dim = (
        (1, 3, 1, 64, 64),
        (17, 9, 3, 64, 64),
        (5, 4, 1, 256, 256),
        (7, 4, 2, 128, 32),
    )[case % 4]
    angles = torch.arange(4096).unsqueeze(1) * 10000.0 ** (
        -torch.arange(0, rotary_dim, 2) / rotary_dim
    )
    cache = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return {
        "positions": torch.randint(0, 4096, (tokens,), generator=generator).to(device),
        "query": torch.randn(tokens, heads * head_size, generator=generator).to(device, dtype),
        "key": torch.randn(tokens, kv_heads * head_size, generator=generator).to(device, dtype),
        "head_size": head_size,
        "cos_sin_cache": cache.to(device),
        "is_neox_style": case != 3,
    }


@mrotary_embedding.register_inputs
def _mrotary_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    given = _rotary_inputs(case, dtype, device, generator)
    tokens, angles = len(given["positions"]), given["cos_sin_cache"].shape[-1] // 2
    places = torch.randint(0, 4096, (3, tokens), generator=generator).to(device)
    third = angles // 3
    more = {"mrope_section": [angles - 2 * third, third, third], "mrope_interleaved": case % 2 > 0}
    return {**given, **more, "positions": places}
