# SPDX-License-Identifier: Apache-2.0
# upstream: csrc/fused_qknorm_rope_kernel.cu @ v0.25.0
"""What lies between the projection of queries, keys and values and attention, in one op."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.ops.kv_cache import reshape_and_cache
from vllmx.ir.ops.layernorm import rms_norm
from vllmx.ir.ops.rotary import rotary_embedding
from vllmx.ir.row_by_row import row_by_row


@register_op
def qk_norm_rope_cache(
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
    """Norm and rotate the heads of queries and keys, store keys and values, return the queries.

    qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size], queries, keys, values;
    query_weight, key_weight: [head_size], None where heads are not normed. The rest as of
    `rms_norm`, `rotary_embedding` and `reshape_and_cache`. Returns [num_tokens, num_heads *
    head_size].
    """
    kv_heads, head_size = key_cache.shape[2:]
    kv_size = kv_heads * head_size
    query, key, value = qkv.split((qkv.shape[1] - 2 * kv_size, kv_size, kv_size), dim=-1)
    if query_weight is not None:
        heads = query.unflatten(-1, (-1, head_size))
        query = rms_norm.fn(heads, query_weight, epsilon).flatten(-2)
    if key_weight is not None:
        heads = key.unflatten(-1, (-1, head_size))
        key = rms_norm.fn(heads, key_weight, epsilon).flatten(-2)
    rotated, turned = rotary_embedding.fn(
        positions, query, key, head_size, cos_sin_cache, is_neox_style
    )
    assert turned is not None
    shape = (-1, kv_heads, head_size)
    rows = (turned.view(shape), value.unflatten(-1, shape[1:]))
    reshape_and_cache.fn(*rows, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    return rotated


qk_norm_rope_cache.set_batch_invariant(
    REFERENCE,
    ANY_DEVICE,
    row_by_row(qk_norm_rope_cache.fn, "qkv", "positions", "slot_mapping"),
)

for _dtype, _atol, _rtol in ((torch.float16, 4e-3, 2e-3), (torch.bfloat16, 3.2e-2, 1.6e-2)):
    qk_norm_rope_cache.set_tolerance(
        _dtype,
        _atol,
        _rtol,
        why="one unit in the last place at 4: the definition rounds after the norm and after its "
        "weight, before two numbers of that size are subtracted; a kernel rounds once",
    )


@qk_norm_rope_cache.register_facts
def _facts(
    query_weight: Tensor | None,
    cos_sin_cache: Tensor,
    key_cache: Tensor,
    is_neox_style: bool,
    **others: Any,
) -> dict[str, Any]:
    return {
        "head_size": key_cache.shape[-1],
        "rotary_dim": cos_sin_cache.shape[-1],
        "is_neox_style": is_neox_style,
    }


@qk_norm_rope_cache.register_inputs
def _inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, heads, kv_heads, head_size, blocks, block_size = (
        (1, 2, 1, 64, 3, 16),
        (17, 9, 3, 64, 5, 8),
        (5, 4, 1, 256, 2, 16),
        (7, 16, 8, 128, 4, 4),
    )[case % 4]
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    if case % 2:
        slots[::3] = -1
    angles = torch.arange(512).unsqueeze(1) * 10000.0 ** (
        -torch.arange(0, head_size, 2) / head_size
    )
    cache = torch.zeros(blocks, block_size, 2, kv_heads, head_size, device=device, dtype=dtype)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size, generator=generator)
    weights = 1 + 0.3 * torch.randn(2, head_size, generator=generator)
    normed = case != 1
    return {
        "qkv": qkv.to(device, dtype),
        "query_weight": weights[0].to(device, dtype) if normed else None,
        "key_weight": weights[1].to(device, dtype) if normed else None,
        "epsilon": 1e-6,
        "positions": torch.randint(0, 512, (tokens,), generator=generator).to(device),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "slot_mapping": slots.to(device),
        "is_neox_style": True,
    }
