# SPDX-License-Identifier: Apache-2.0
"""Tiny models for bfloat16: what they decide, a rounding does not change."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hybrid_driver import HybridDriver
from torch import Tensor

from vllmx.ir.ops.fused_moe import SCORINGS
from vllmx.layers.fused_moe import FusedMoE
from vllmx.tiny.checkpoint import save
from vllmx.tiny.configs import FAMILIES, HYBRIDS, SISTERS, WITH_EXPERTS, config_of
from vllmx.tiny.margins import (
    CODE,
    ROUTERS,
    SIGMOID,
    SUFFIX,
    Routing,
    _before,
    _order,
    _wanted,
    codes,
)
from vllmx.tiny.tensors import shapes

TOKENS = np.random.default_rng(7).integers(3, 1024, 200).tolist()
NO_EXPERTS = {"tiny-qwen3_5"}
"""A hybrid, of which the head alone decides."""
TIMES = 5
"""How much greater a margin is, at least, than the most that bfloat16 moves a score by."""


def test_codes_of_any_two_tokens_differ_in_twelve_elements_at_least() -> None:
    found = codes()
    assert found.shape == (1024, CODE)
    same = found @ found.T - CODE * np.eye(1024)
    assert np.abs(same).max() == CODE - 2 * 12


def test_every_family_with_a_router_has_a_model_for_bfloat16() -> None:
    routed = {
        name
        for name in FAMILIES
        if not name.endswith(SUFFIX)
        and any(tensor.endswith(ROUTERS) for tensor in shapes(config_of(name)))
    }
    assert routed == set(WITH_EXPERTS)
    assert set(SISTERS) == routed | NO_EXPERTS == routed | set(HYBRIDS)
    assert {name.removesuffix(SUFFIX) for name in FAMILIES if name.endswith(SUFFIX)} == set(SISTERS)


@dataclass
class Choice:
    """What one router chose for TOKENS. scores: [T, E], what it chose by; chosen: bool [T, E];
    groups: [T, G], how good each of the groups is that experts are in."""

    scores: Tensor
    chosen: Tensor
    groups: Tensor
    scoring: str

    def margins(self) -> tuple[Tensor, Tensor]:
        """The least margins of the experts within the groups kept, and of those groups."""
        count = self.groups.shape[1]
        kept = self.chosen.unflatten(1, (count, -1)).any(dim=2)
        candidates = kept.repeat_interleave(self.scores.shape[1] // count, dim=1)
        return (
            _margin(self.scores, self.chosen, candidates & ~self.chosen),
            _margin(self.groups, kept, ~kept),
        )


def _margin(scores: Tensor, chosen: Tensor, others: Tensor) -> Tensor:
    """The least that the worst score of those chosen is above the best of the others."""
    worst = scores.masked_fill(~chosen, float("inf")).amin(dim=1)
    return (worst - scores.masked_fill(~others, float("-inf")).amax(dim=1)).min()


def chosen_by(logits: Tensor, ids: Tensor, router: dict) -> Choice:
    """By the logits themselves where neither a sigmoid nor a bias makes other scores of them."""
    scoring, bias = router.get("scoring_func", "softmax"), router.get("e_score_correction_bias")
    scores = logits.float()
    if scoring == "sigmoid" or bias is not None:
        scores = SCORINGS[scoring](scores) + (0.0 if bias is None else bias)
    parts = scores.unflatten(1, (router.get("num_expert_group", 1), -1))
    groups = parts.topk(1 if bias is None else 2, dim=2).values.sum(dim=2)
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids.long(), True)
    return Choice(scores, chosen, groups, scoring)


def told(folder, dtype: torch.dtype) -> tuple[Tensor, list[Choice]]:
    """Logits of TOKENS, and what each router chose."""
    driver = HybridDriver(folder, dtype=dtype)
    choices: list[Choice] = []

    def watch(layer: FusedMoE) -> None:
        route = layer._route

        def watched(logits: Tensor) -> tuple[Tensor, Tensor]:
            weights, ids = route(logits)
            choices.append(chosen_by(logits, ids, getattr(route, "keywords", {})))
            return weights, ids

        layer._route = watched

    for module in driver.model.modules():
        if isinstance(module, FusedMoE):
            watch(module)
    return driver.step({0: TOKENS})[0].float(), choices


def same(exact: list[Choice], rounded: list[Choice]) -> bool:
    """Whether every router chose the same experts for every token."""
    return all(torch.equal(a.chosen, b.chosen) for a, b in zip(exact, rounded, strict=True))


def far(exact: list[Choice], rounded: list[Choice]) -> float:
    """The least margin, in the most that scores of its router differ by."""
    found = []
    for a, b in zip(exact, rounded, strict=True):
        moved = ((a.scores - b.scores).abs().max(), (a.groups - b.groups).abs().max())
        found += [float(m / d) for m, d in zip(a.margins(), moved) if not torch.isinf(m)]
    return min(found)


@pytest.mark.parametrize("name", SISTERS)
def test_what_is_decided_is_far_from_what_bfloat16_rounds(name: str, tmp_path) -> None:
    folder = tmp_path / "model"
    save(name + SUFFIX, folder)
    exact, choices = told(folder, torch.float32)
    rounded, choices_too = told(folder, torch.bfloat16)
    config = config_of(name)
    routers = sum(tensor.endswith(ROUTERS) for tensor in shapes(config))
    assert len(choices) == routers
    assert bool(routers) == (name not in NO_EXPERTS)
    assert same(choices, choices_too)
    if routers:
        assert far(choices, choices_too) > TIMES
    for choice in choices:
        assert choice.chosen.any(dim=0).all(), "no expert is idle"
        few = config.get("num_experts_per_tok") == 1 or choice.groups.shape[1] > 1
        assert len(choice.chosen.unique(dim=0)) >= (8 if few else 20), "tokens go their own ways"
        assert (choice.scoring == "sigmoid") == (config["model_type"] in SIGMOID)
    likeliest = exact.argmax(dim=-1)
    assert (likeliest != rounded.argmax(dim=-1)).float().mean() <= 0.02
    assert len(likeliest.unique()) > 100
    if name in HYBRIDS:
        assert exact.softmax(dim=-1).amax(dim=-1).mean() < 0.5, "nothing is nearly certain"


@pytest.mark.parametrize("name", ["tiny-mixtral", "tiny-deepseek_v3", "tiny-ernie4_5_moe"])
def test_what_the_models_for_float32_decide_a_rounding_changes(name: str, tmp_path) -> None:
    """So the test above is one that weights can fail."""
    save(name, tmp_path / "model")
    _, choices = told(tmp_path / "model", torch.float32)
    _, choices_too = told(tmp_path / "model", torch.bfloat16)
    assert not same(choices, choices_too)
    assert far(choices, choices_too) < 1


def test_ties_among_what_is_drawn_fall_the_same_way_on_every_processor() -> None:
    """A sort that is not stable puts equal numbers in another order where registers are wider."""
    drawn = np.repeat(np.float32([0.5, -0.5, 0.25, 1.0]), 256)
    equal = [np.flatnonzero(drawn == value)[::-1] for value in (-0.5, 0.25, 0.5, 1.0)]
    order = np.concatenate(equal).tolist()
    before = _before(drawn)
    assert [before[token] for token in order] == [order[-1], *order[:-1]]
    routing = Routing(chosen=2, groups=2, kept=1)
    wanted = _wanted(routing, 1, 8, lambda name, shape: np.zeros(shape, np.float32))
    assert wanted.tolist() == [[1.0, 1.5, 0, 0, 0, 0, 0, 0]]
    assert _order(routing, np.zeros(8, np.float32)).tolist() == [*range(8)]
