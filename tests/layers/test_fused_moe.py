# SPDX-License-Identifier: Apache-2.0
"""Experts: routing, weights in either of the two forms, what is refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.config import KernelConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE
from vllmx.layers.gate_linear import GateLinear
from vllmx.models.utils import LLAMA_MAPPER, AutoWeightsLoader

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 8, 6


class Model(torch.nn.Module):
    def __init__(
        self, dtype: torch.dtype = torch.float32, renormalize: bool = True, **how: object
    ) -> None:
        super().__init__()
        ops = OpTable(KernelConfig(default_priority=["torch"]), "cpu", dtype)
        self.experts = FusedMoE(EXPERTS, TOP_K, HIDDEN, INNER, ops, renormalize, **how)

    def load(self, weights: dict[str, Tensor]) -> "Model":
        named = {f"mlp.{name}": tensor for name, tensor in weights.items()}
        outer = torch.nn.Module()
        outer.mlp = self
        AutoWeightsLoader(outer).load_weights(named.items(), LLAMA_MAPPER)
        return self


def stacked() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "experts.gate_up_proj": torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator),
        "experts.down_proj": torch.randn(EXPERTS, HIDDEN, INNER, generator=generator),
    }


def one_by_one() -> dict[str, Tensor]:
    whole = stacked()
    found = {}
    for i in range(EXPERTS):
        gate, up = whole["experts.gate_up_proj"][i].chunk(2)
        found[f"experts.{i}.gate_proj.weight"] = gate
        found[f"experts.{i}.up_proj.weight"] = up
        found[f"experts.{i}.down_proj.weight"] = whole["experts.down_proj"][i]
    return found


def by_hand(x: Tensor, scores: Tensor, renormalize: bool) -> Tensor:
    weights, out = stacked(), torch.zeros_like(x)
    for t in range(len(x)):
        shares = scores[t].softmax(0)
        best = shares.argsort(descending=True)[:TOP_K].tolist()
        total = shares[best].sum() if renormalize else 1.0
        for expert in best:
            gate, up = (weights["experts.gate_up_proj"][expert] @ x[t]).chunk(2)
            found = weights["experts.down_proj"][expert] @ (F.silu(gate) * up)
            out[t] += shares[expert] / total * found
    return out


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("weights", [stacked, one_by_one])
def test_each_token_gets_its_experts_by_their_weights(weights, renormalize: bool) -> None:
    model = Model(renormalize=renormalize).load(weights())
    x, scores = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    want = by_hand(x, scores, renormalize)
    torch.testing.assert_close(model.experts(x, scores), want, atol=1e-5, rtol=1e-5)
    alone = torch.cat([model.experts(x[i : i + 1], scores[i : i + 1]) for i in range(9)])
    torch.testing.assert_close(alone, want, atol=1e-5, rtol=1e-5)


def test_a_bfloat16_checkpoint_is_served_in_float32() -> None:
    weights = {name: tensor.bfloat16() for name, tensor in stacked().items()}
    experts = Model().load(weights).experts
    assert experts.w13_weight.dtype == torch.float32
    assert torch.equal(experts.w2_weight, weights["experts.down_proj"].float())


def test_experts_in_both_forms_are_refused() -> None:
    weights = {**stacked(), **one_by_one()}
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.gate_proj.*both stacked and one by one"
    ):
        Model().load(weights)
    weights = {**one_by_one(), **stacked()}
    with pytest.raises(CheckpointError, match=r"experts\.gate_up_proj.*twice|both stacked"):
        Model().load(weights)


def test_a_missing_expert_is_named_as_the_checkpoint_would() -> None:
    weights = one_by_one()
    del weights["experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"lacks mlp\.experts\.2\.up_proj\.weight"):
        Model().load(weights)
    weights = stacked()
    del weights["experts.down_proj"]
    with pytest.raises(CheckpointError, match=r"lacks mlp\.experts\.down_proj\."):
        Model().load(weights)


def test_an_expert_too_many_or_of_another_shape_is_named() -> None:
    weights = one_by_one() | {"experts.4.up_proj.weight": torch.ones(INNER, HIDDEN)}
    with pytest.raises(
        CheckpointError, match=r"experts\.4\.up_proj\.weight is of expert 4, .*of 4 experts"
    ):
        Model().load(weights)
    weights = stacked() | {"experts.down_proj": torch.ones(EXPERTS, INNER, HIDDEN)}
    with pytest.raises(CheckpointError, match=r"experts\.down_proj has shape \[4, 6, 8\]"):
        Model().load(weights)


# --------------------------------------------------------------------------- routers and biases


def alone(model: Model, x: Tensor) -> list[Tensor]:
    """What each expert by itself makes of `x`."""
    experts = model.experts
    run = experts.ops.reference("fused_experts").fn
    weights = (experts.w13_weight, experts.w2_weight)
    biases = (experts.activation, experts.w13_bias, experts.w2_bias)
    ones = torch.ones(len(x), 1)
    return [run(x, *weights, ones, torch.full((len(x), 1), e), *biases) for e in range(EXPERTS)]


@pytest.mark.parametrize(
    "bias", [None, torch.tensor([0.0, 0.9, 0.0, 0.9])], ids=["plain", "biased"]
)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_a_router_chooses_by_scores_and_weighs_without_the_bias(
    scoring: str, groups: int, bias: Tensor | None
) -> None:
    model = Model(
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=1,
        scoring_func=scoring,
        routed_scaling_factor=2.5,
        e_score_correction_bias=bias,
    ).load(stacked())
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(9, HIDDEN, generator=generator)
    logits = torch.randn(9, EXPERTS, generator=generator)
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    want = torch.zeros_like(x)
    answers = alone(model, x)
    for t in range(9):
        allowed = list(range(EXPERTS))
        if groups == 2:  # two experts each: with a bias by their sum, else by the better one
            worth = (
                choice[t].view(2, 2).sum(1) if bias is not None else choice[t].view(2, 2).amax(1)
            )
            allowed = [0, 1] if worth[0] > worth[1] else [2, 3]
        best = sorted(allowed, key=lambda e: -float(choice[t, e]))[:TOP_K]
        total = scores[t, best].sum()
        for expert in best:
            want[t] += 2.5 * scores[t, expert] / total * answers[expert][t]
    torch.testing.assert_close(model.experts(x, logits), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_of_a_gate_are_float32_whatever_the_dtype(dtype: torch.dtype) -> None:
    ops = OpTable(KernelConfig(default_priority=["torch"]), "cpu", dtype)
    gate = GateLinear(HIDDEN, EXPERTS, ops, correction_bias=True)
    known = gate.e_score_correction_bias
    weight, bias = torch.randn(EXPERTS, HIDDEN), torch.rand(EXPERTS)
    outer = torch.nn.Module()
    outer.gate = gate
    named = {"gate.weight": weight, "gate.e_score_correction_bias": bias}
    AutoWeightsLoader(outer).load_weights(named.items(), LLAMA_MAPPER)
    assert known is gate.e_score_correction_bias and torch.equal(known, bias)
    x = torch.randn(5, HIDDEN).to(dtype)
    assert torch.equal(gate(x), F.linear(x.float(), weight))


def test_experts_with_biases_and_other_names() -> None:
    named = {"ckpt_names": ("w1", "w2", "w3")}
    parts = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
    weights = {}
    for name, tensor in one_by_one().items():
        _, expert, part, _ = name.split(".")
        weights[f"experts.{expert}.{parts[part]}.weight"] = tensor
    x, scores = torch.randn(9, HIDDEN), torch.randn(9, EXPERTS)
    got = Model(**named).load(weights).experts(x, scores)
    torch.testing.assert_close(got, by_hand(x, scores, True), atol=1e-5, rtol=1e-5)
    biased = Model(has_bias=True).load(
        {
            **stacked(),
            "experts.gate_up_proj_bias": torch.zeros(EXPERTS, 2 * INNER),
            "experts.down_proj_bias": torch.ones(EXPERTS, HIDDEN),
        }
    )
    torch.testing.assert_close(biased.experts(x, scores), got + 1, atol=1e-5, rtol=1e-5)
    with pytest.raises(CheckpointError, match=r"lacks mlp\.experts\.gate_up_proj_bias"):
        Model(has_bias=True).load(stacked())


def test_a_bias_of_experts_has_no_place_without_has_bias() -> None:
    with pytest.raises(CheckpointError, match="no parameter down_proj_bias"):
        Model().load({**stacked(), "experts.down_proj_bias": torch.ones(EXPERTS, HIDDEN)})
