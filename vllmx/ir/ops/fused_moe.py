# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_moe/ @ v0.25.0
"""Mixtures of experts: which experts a token goes to, and what comes back from them.

Shapes: T tokens, E experts, K experts a token, H hidden size, I inner size of an expert.
"""

from collections.abc import Callable
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


SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
}
"""What makes scores of a router's logits."""


@register_op
def grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The `topk` best experts of each token within its best groups, best first: (weights, ids).

    gating_output: [T, E], of which each of `num_expert_group` equal runs is a group; all but the
    best `topk_group` groups are out of the running. A group is as good as its best expert, or,
    with the bias (float32 [E]), as its best two together: the bias is added to the scores to
    choose by, and is in no weight. weights: float32 [T, K], the scores, with `renormalize` over
    their sum, times routed_scaling_factor; ids: int32 [T, K].
    """
    scores = SCORINGS[scoring_func](gating_output.float())
    choice = scores if e_score_correction_bias is None else scores + e_score_correction_bias
    if num_expert_group > 1:
        groups = choice.unflatten(-1, (num_expert_group, -1))
        best = groups.topk(1 if e_score_correction_bias is None else 2, dim=-1)[0].sum(dim=-1)
        kept = torch.zeros_like(best).scatter_(1, best.topk(topk_group, dim=-1)[1], 1.0)
        choice = groups.masked_fill(kept[:, :, None] == 0, float("-inf")).flatten(1)
    ids = choice.topk(topk, dim=-1)[1]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * routed_scaling_factor, ids.to(torch.int32)


def _swigluoai(gate: Tensor, up: Tensor) -> Tensor:
    """gpt-oss: both clamped at 7, the gate's sigmoid steeper, one added to `up`; rounded once."""
    dtype, gate, up = gate.dtype, gate.float(), up.float()
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))).to(dtype)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu": lambda gate, up: F.gelu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "swigluoai_uninterleave": _swigluoai,
}
"""What an expert makes of its two halves, by upstream's names."""


@register_op
def fused_experts(
    hidden_states: Tensor,
    w13_weight: Tensor,
    w2_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """The weighted sum of down(activation(gate(x), up(x))) over each token's experts.

    hidden_states: [T, H]; w13_weight: [E, 2 I, H], gate above up; w2_weight: [E, H, I];
    topk_weights: float32 [T, K]; topk_ids: int32 [T, K]; w13_bias: [E, 2 I]; w2_bias: [E, H].
    activation: one of ACTIVATIONS. Returns hidden_states' shape and dtype; the sum over experts
    is taken in float32, by rising number of expert.
    """
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    act = ACTIVATIONS[activation]
    for expert in topk_ids.unique().tolist():
        tokens, places = torch.where(topk_ids == expert)
        bias = None if w13_bias is None else w13_bias[expert]
        gate, up = F.linear(hidden_states[tokens], w13_weight[expert], bias).chunk(2, dim=-1)
        bias = None if w2_bias is None else w2_bias[expert]
        found = F.linear(act(gate, up), w2_weight[expert], bias).float()
        out.index_add_(0, tokens, found * topk_weights[tokens, places, None])
    return out.to(hidden_states.dtype)


topk_softmax.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(topk_softmax.fn))
grouped_topk.set_batch_invariant(REFERENCE, ANY_DEVICE, row_by_row(grouped_topk.fn))
fused_experts.set_batch_invariant(
    REFERENCE,
    ANY_DEVICE,
    row_by_row(fused_experts.fn, "hidden_states", "topk_weights", "topk_ids"),
)


_WHY = (
    "the definition rounds between the two products: on the op's own inputs it is off by {} of a "
    "sum of up to 4 from float64, where terms cancel"
)
fused_experts.set_tolerance(torch.bfloat16, 5e-2, 1.6e-2, _WHY.format("0.02"))
fused_experts.set_tolerance(torch.float16, 6e-3, 1e-3, _WHY.format("0.003"))


@topk_softmax.register_inputs
def _topk_softmax_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, experts, topk = ((1, 4, 1), (17, 8, 2), (33, 60, 4))[case % 3]
    return {
        "gating_output": _scores(tokens, experts, generator).to(device, dtype),
        "topk": topk,
        "renormalize": bool(case % 2),
    }


def _scores(tokens: int, experts: int, generator: torch.Generator) -> Tensor:
    """Logits without ties in any dtype."""
    order = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
    return (torch.stack(order) - experts // 2) / 16


@grouped_topk.register_inputs
def _grouped_topk_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    tokens, experts, topk, groups = ((1, 8, 2, 1), (17, 16, 4, 4), (33, 60, 6, 3))[case % 3]
    logits = _scores(tokens, experts, generator)
    bias = torch.randn(experts, generator=generator) * 0.2
    return {
        "gating_output": logits.to(device, dtype),
        "topk": topk,
        "renormalize": bool(case % 2),
        "num_expert_group": groups,
        "topk_group": (groups + 1) // 2,
        "scoring_func": ("softmax", "sigmoid")[case // 2 % 2],
        "routed_scaling_factor": 1.0 + case % 2,
        "e_score_correction_bias": bias.to(device) if case % 3 else None,
    }


@grouped_topk.register_facts
def _grouped_topk_facts(**inputs: Any) -> dict[str, Any]:
    return {"num_expert_group": inputs.get("num_expert_group", 1)}


@fused_experts.register_facts
def _fused_experts_facts(w13_weight: Tensor, w2_weight: Tensor, **inputs: Any) -> dict[str, Any]:
    return {
        "hidden_size": w13_weight.shape[2],
        "intermediate_size": w2_weight.shape[2],
        "activation": inputs.get("activation", "silu"),
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
    biases: dict[str, Tensor | None] = {"w13_bias": None, "w2_bias": None}
    if case % 4 == 3:
        biases["w13_bias"] = torch.randn(experts, 2 * inner, generator=generator) / 4
        biases["w2_bias"] = torch.randn(experts, hidden, generator=generator) / 4
    return {
        "hidden_states": torch.randn(tokens, hidden, generator=generator).to(device, dtype),
        "w13_weight": w13.to(device, dtype),
        "w2_weight": w2.to(device, dtype),
        "topk_weights": weights,
        "topk_ids": ids,
        "activation": list(ACTIVATIONS)[case % len(ACTIVATIONS)],
        **{k: None if b is None else b.to(device, dtype) for k, b in biases.items()},
    }
