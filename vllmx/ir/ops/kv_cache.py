# SPDX-License-Identifier: Apache-2.0
# upstream: csrc/cache_kernels.cu (reshape_and_cache_flash) @ v0.25.0
"""Writing keys and values into the paged cache."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op


@register_op
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Store each token's key and value in its slot, in place.

    key, value: [num_tokens, num_kv_heads, head_size]; key_cache, value_cache:
    [num_blocks, block_size, num_kv_heads, head_size]; slot_mapping: int64 [num_tokens],
    block * block_size + offset, negative for a padding token that is not stored.

    A cache of one byte a number takes key / k_scale and value / v_scale, to the nearest number it
    has; beyond its range that is its largest one. For another cache both scales are 1.0.
    """
    real = (slot_mapping >= 0).nonzero().flatten()
    slots = slot_mapping[real]
    block_size = key_cache.shape[1]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, offsets] = _stored(key[real], key_cache.dtype, k_scale)
    value_cache[blocks, offsets] = _stored(value[real], value_cache.dtype, v_scale)


def _stored(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize == 1:
        # What is too large would become infinite or NaN, and poison the whole row.
        limit = torch.finfo(dtype).max
        x = (x.to(torch.float32) / scale).clamp(-limit, limit)
    return x.to(dtype)


reshape_and_cache.set_batch_invariant(REFERENCE, ANY_DEVICE)


@reshape_and_cache.register_inputs
def _reshape_and_cache_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, heads, head_size, blocks, block_size = (
        (1, 1, 64, 3, 16),
        (17, 3, 64, 5, 8),
        (33, 2, 256, 4, 16),
    )[case % 3]
    slots = torch.randperm(blocks * block_size, generator=generator)[:tokens]
    if case % 2:
        slots[::3] = -1
    cache = torch.zeros(blocks, block_size, 2, heads, head_size, device=device, dtype=dtype)
    return {
        "key": torch.randn(tokens, heads, head_size, generator=generator).to(device, dtype),
        "value": torch.randn(tokens, heads, head_size, generator=generator).to(device, dtype),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "slot_mapping": slots.to(device),
    }


@reshape_and_cache.register_facts
def _reshape_and_cache_facts(slot_mapping: Tensor, **others: Any) -> dict[str, Any]:
    return {"padded": bool((slot_mapping < 0).any())}
