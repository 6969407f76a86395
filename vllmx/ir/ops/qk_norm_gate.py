# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_qk_norm_rope.py @ v0.25.0
"""What lies between a projection with gates and attention, the cache aside, in one op."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.ops.layernorm import rms_norm
from vllmx.ir.ops.rotary import rotary_embedding
from vllmx.ir.row_by_row import row_by_row


@register_op
def fused_qk_rmsnorm_rope_gate(
    q_gate: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Part queries from gates, norm the heads of queries and keys, and rotate them.

    q_gate: [num_tokens, num_heads * 2 * head_size], each head's query and then its gate; k:
    [num_tokens, num_kv_heads * head_size]; both may be slices of wider rows. q_weight, k_weight:
    [head_size], what a normed head is multiplied with. cos_sin_cache: [max_position, rotary_dim],
    cosines, then sines; rotary_dim may be less than head_size. positions: int [num_tokens]. Element
    i turns with i + rotary_dim / 2 (NeoX style).

    Returns queries and gates, [num_tokens, num_heads * head_size], and between them the keys in
    k's shape, all contiguous and of their inputs' dtypes; what is normed is rounded to it before it
    is rotated. Gates are as they were, before any sigmoid.
    """
    head_size = len(q_weight)
    q, gate = q_gate.unflatten(-1, (-1, 2, head_size)).unbind(-2)
    q = rms_norm.fn(q, q_weight, epsilon).flatten(-2)
    k = rms_norm.fn(k.unflatten(-1, (-1, head_size)), k_weight, epsilon).flatten(-2)
    q, turned = rotary_embedding.fn(positions, q, k, head_size, cos_sin_cache)
    assert turned is not None
    return q, turned, gate.flatten(-2).contiguous()


fused_qk_rmsnorm_rope_gate.set_batch_invariant(
    REFERENCE,
    ANY_DEVICE,
    row_by_row(fused_qk_rmsnorm_rope_gate.fn, "q_gate", "k", "positions"),
)


for _dtype, _atol, _rtol in ((torch.float16, 4e-3, 2e-3), (torch.bfloat16, 3.2e-2, 1.6e-2)):
    fused_qk_rmsnorm_rope_gate.set_tolerance(
        _dtype,
        _atol,
        _rtol,
        why="one unit in the last place at 4: a norm that falls between two numbers may be rounded "
        "to the other one, and what it is turned with may take away most of the number itself",
    )


@fused_qk_rmsnorm_rope_gate.register_facts
def _facts(q_weight: Tensor, cos_sin_cache: Tensor, **others: Any) -> dict[str, Any]:
    return {"head_size": len(q_weight), "rotary_dim": cos_sin_cache.shape[-1]}


@fused_qk_rmsnorm_rope_gate.register_inputs
def _inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, heads, kv_heads, head_size, rotary_dim = (
        (1, 2, 1, 64, 64),
        (17, 6, 2, 64, 16),
        (5, 4, 1, 256, 64),
        (7, 3, 3, 80, 20),
    )[case % 4]
    size = kv_heads * head_size
    qkv = torch.randn(tokens, 2 * heads * head_size + 2 * size, generator=generator)
    q_gate, k, _ = qkv.to(device, dtype).split((2 * heads * head_size, size, size), dim=-1)
    weights = 1 + 0.3 * torch.randn(2, head_size, generator=generator)
    angles = torch.arange(512).unsqueeze(1) * 10000.0 ** (
        -torch.arange(0, rotary_dim, 2) / rotary_dim
    )
    return {
        "q_gate": q_gate,
        "k": k,
        "q_weight": weights[0].to(device),
        "k_weight": weights[1].to(device),
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), dim=-1).to(device),
        "positions": torch.randint(0, 512, (tokens,), generator=generator).to(device),
        "epsilon": 1e-6,
    }
