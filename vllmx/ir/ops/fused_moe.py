# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_moe/ @ v0.25.0
"""Mixtures of experts: which experts a token goes to, and what comes back from them.

Shapes: T tokens, E experts, K experts a token, H hidden size, I inner size of an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op
from vllmx.ir.row_by_row import row_by_row


@register_op
def topk_softmax(gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The `topk` likeliest experts of each token, likeliest first: (weights, ids).

    gating_output: [T, E]. weights: float32 [T, K], the experts' probabilities among all, or, with
    `renormalize`, among those chosen; ids: int32 [T, K].
    """
    weights, ids = gating_output.float().softmax(dim=-1).topk(topk, dim=-1)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, ids.to(torch.int32)


@register_op
def fused_experts(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
) -> Tensor:
    """The weighted sum of down(silu(gate(x)) * up(x)) over each token's experts.

    hidden_states: [T, H]; w13_weight: [E, 2 I, H], gate above up; w2_weight: [E, H, I];
    topk_weights: float32 [T, K]; topk_ids: int32 [T, K]. Returns hidden_states' shape and dtype;
    the sum over experts is taken in float32, by rising number of expert.
    """
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    for expert in topk_ids.unique().tolist():
        tokens, places = torch.where(topk_ids == expert)
        gate, up = F.linear(hidden_states[tokens], w13_weight[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, w2_weight[expert]).float()
        out.index_add_(0, tokens, found * topk_weights[tokens, places, None])
    return out.to(hidden_states.dtype)


topk_softmax.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(topk_softmax.fn))
fused_experts.set_batch_invariant(
    REFERENCE,
    ANY_DEVICE,
    row_by_row(fused_experts.fn, "hidden_states", "topk_weights", "topk_ids"),
)


@topk_softmax.register_inputs
def _topk_softmax_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, experts, topk = ((1, 4, 1), (17, 8, 2), (33, 60, 4))[case % 3]
    logits = torch.randn(tokens, experts, generator=generator) * 2
    return {
        "gating_output": logits.to(device, dtype),
        "topk": topk,
        "renormalize": bool(case % 2),
    }


@fused_experts.register_inputs
def _fused_experts_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, experts, hidden, inner = ((1, 4, 32, 16), (17, 8, 64, 32))[case % 2]
    routing = _topk_softmax_inputs(case % 2, torch.float32, device, generator)
    weights, ids = topk_softmax.fn(**routing)
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator) * hidden**-0.5
    w2 = torch.randn(experts, hidden, inner, generator=generator) * inner**-0.5
    return {
        "hidden_states": torch.randn(tokens, hidden, generator=generator).to(device, dtype),
        "w13_weight": w13.to(device, dtype),
        "w2_weight": w2.to(device, dtype),
        "topk_weights": weights,
        "topk_ids": ids,
    }
