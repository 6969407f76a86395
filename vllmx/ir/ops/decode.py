# SPDX-License-Identifier: Apache-2.0
# upstream: csrc/fused_qknorm_rope_kernel.cu, vllm/v1/attention/backends/*.py @ v0.25.0
"""A decode step's attention from the projected queries, keys and values on, in one op."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import register_op
from vllmx.ir.ops.attention import paged_attention
from vllmx.ir.ops.qkv import qk_norm_rope_cache


@register_op
def qk_norm_rope_decode(
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
    """`qk_norm_rope_cache`, then `paged_attention`, for one new token of each request.

    qkv: [num_reqs, (num_heads + 2 * num_kv_heads) * head_size]; the token stands last of its
    request, so positions are seq_lens - 1. A request of length 0 is padding: it stores nothing
    and its output is zero. max_seq_len: no request is longer. Rotates halves of whole heads.
    Returns [num_reqs, num_heads * head_size] and writes both caches.
    """
    query = qk_norm_rope_cache.fn(
        qkv,
        query_weight,
        key_weight,
        epsilon,
        positions,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    starts = torch.arange(len(qkv) + 1, dtype=torch.int32, device=qkv.device)
    query = query.unflatten(-1, (-1, key_cache.shape[-1]))
    # A request without tokens has no softmax; it looks at one slot, and its output is dropped.
    lengths = seq_lens.clamp(min=1)
    caches = (key_cache, value_cache, block_table)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    out = paged_attention.fn(query, *caches, starts, lengths, scale, **scales)
    return out.masked_fill((seq_lens == 0)[:, None, None], 0.0).flatten(1)


for _dtype, _atol, _rtol in ((torch.float16, 4e-3, 2e-3), (torch.bfloat16, 3.2e-2, 1.6e-2)):
    qk_norm_rope_decode.set_tolerance(
        _dtype,
        _atol,
        _rtol,
        why="as of qk_norm_rope_cache: the stored keys differ by one unit in the last place at 4",
    )


@qk_norm_rope_decode.register_facts
def _facts(cos_sin_cache: Tensor, key_cache: Tensor, **others: Any) -> dict[str, Any]:
    return {"head_size": key_cache.shape[-1], "rotary_dim": cos_sin_cache.shape[-1]}


BATCHES = (
    # sequence lengths, heads, kv heads, head size, block size, normed
    ([1], 2, 1, 64, 16, True),
    ([5, 40, 17, 0], 9, 3, 64, 8, False),
    ([70, 200, 64, 65, 129], 4, 1, 128, 16, True),
    ([16, 3], 16, 8, 32, 4, True),
)


@qk_norm_rope_decode.register_inputs
def _inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    seq_lens, heads, kv_heads, head_size, block_size, normed = BATCHES[case % len(BATCHES)]
    width = -(-max(seq_lens) // block_size)
    blocks = width * len(seq_lens) + 1
    cache = torch.randn(blocks, block_size, 2, kv_heads, head_size, generator=generator)
    cache = cache.to(device, dtype)
    table = torch.randperm(blocks - 1, generator=generator).view(len(seq_lens), width) + 1
    lengths = torch.tensor(seq_lens)
    positions = (lengths - 1).clamp(min=0)
    blocks_of = table.gather(1, (positions // block_size)[:, None])[:, 0]
    slots = torch.where(lengths > 0, blocks_of * block_size + positions % block_size, -1)
    angles = torch.arange(512).unsqueeze(1) * 10000.0 ** (
        -torch.arange(0, head_size, 2) / head_size
    )
    qkv = torch.randn(len(seq_lens), (heads + 2 * kv_heads) * head_size, generator=generator)
    weights = 1 + 0.3 * torch.randn(2, head_size, generator=generator)
    return {
        "qkv": qkv.to(device, dtype),
        "query_weight": weights[0].to(device, dtype) if normed else None,
        "key_weight": weights[1].to(device, dtype) if normed else None,
        "epsilon": 1e-6,
        "positions": positions.to(device),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "slot_mapping": slots.to(device),
        "block_table": table.to(device, torch.int32),
        "seq_lens": lengths.to(device, torch.int32),
        "max_seq_len": 512,
        "scale": head_size**-0.5,
    }
