# SPDX-License-Identifier: Apache-2.0
"""Drawn tokens follow the distribution that the filters leave: chi-square over 16,384 draws.

The bound of a test is the 1e-6 quantile of its chi-square, and its power is computed: a noncentral
chi-square says how surely such a test sees a distribution that is off by a given amount.
"""

import itertools
from collections import Counter
from collections.abc import Callable

import chi_square
import numpy as np
import pytest
import torch
from chi_square import FALSE_ALARM, chi_square_tail, quantile

from vllmx.sample import gumbel, min_p, states, topk_topp
from vllmx.sample.ops import get_sampler_ops
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

VOCAB, DRAWS, ROWS = 64, 16_384, 512
SCALES = {"flat": 0.6, "sharp": 1.5}
"""Of logits: `top_k` cuts more of flat ones, `min_p` of sharp ones."""
SETTINGS = {"temperature": 0.7, "top_k": 12, "top_p": 0.85, "min_p": 0.06}
COMBINATIONS = [
    {name: SETTINGS[name] for name in names}
    for count in range(5)
    for names in itertools.combinations(SETTINGS, count)
]


def named(settings: dict) -> str:
    return "+".join(settings) or "none"


def make_logits(scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(VOCAB, generator=torch.Generator().manual_seed(11))


def wanted(logits: torch.Tensor, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The distribution by definition, one filter after the other, in float64."""
    scaled = logits.double() / temperature
    probs = scaled.softmax(-1)
    probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    if top_k:
        probs = torch.where(probs >= probs.sort(descending=True).values[top_k - 1], probs, 0.0)
    probs = probs / probs.sum()
    order = probs.argsort(descending=True)
    before = probs[order].cumsum(0) - probs[order]
    probs[order[before >= top_p]] = 0.0
    return (probs / probs.sum()).numpy()


def draw(settings: dict, seeded: bool, scale: float) -> np.ndarray:
    """How often each token came up in DRAWS draws."""
    rows = RequestState(ROWS, 4, VOCAB, "cpu")
    sampler = Sampler(rows, "raw_logprobs", seed=5, ops=get_sampler_ops("cpu"))
    for i in range(ROWS):
        row = rows.add_request(str(i), 1, [1], 0)
        sampler.add_request(row, 1, SamplingParams(seed=i if seeded else None, **settings))
    index = np.array(list(rows.req_id_to_index.values()))
    logits = make_logits(scale).repeat(ROWS, 1)
    seen: Counter = Counter()
    for step in range(DRAWS // ROWS):
        seen.update(sampler(logits, index, np.full(ROWS, step)).sampled_token_ids.tolist())
    return np.array([seen[token] for token in range(VOCAB)])


def log_gamma(x: float) -> float:
    return float(torch.lgamma(torch.tensor(x, dtype=torch.float64)))


def power(noncentrality: float, degrees: int) -> float:
    """How surely the test sees a deviation: a Poisson mixture of chi-squares."""
    bound = quantile(FALSE_ALARM, degrees)
    mean, total = noncentrality / 2, 0.0
    for j in range(max(0, int(mean - 12 * mean**0.5)), int(mean + 12 * mean**0.5) + 12):
        weight = np.exp(j * np.log(max(mean, 1e-300)) - mean - log_gamma(j + 1.0))
        total += weight * chi_square_tail(bound, degrees + 2 * j)
    return total


def follows(settings: dict, seeded: bool, scale: float = 1.0) -> bool:
    """Whether the draws pass the test and none is a token that the filters exclude."""
    want = wanted(make_logits(scale), **settings)
    return chi_square.follows(draw(settings, seeded, scale), want)


@pytest.mark.parametrize("seeded", [False, True], ids=["free", "seeded"])
@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("settings", COMBINATIONS, ids=named)
def test_draws_follow_the_distribution_that_the_filters_leave(settings, scale, seeded) -> None:
    assert follows(settings, seeded, scale)


def surely_seen(settings: dict, other: dict, scale: float) -> float:
    """How surely the test of `settings` sees that draws are those of `other`."""
    want, drawn = (wanted(make_logits(scale), **each) for each in (settings, other))
    kept = want > 0
    if outside := float(drawn[~kept].sum()):
        return 1 - (1 - outside) ** DRAWS  # one excluded token is enough
    noncentrality = DRAWS * float(((drawn - want)[kept] ** 2 / want[kept]).sum())
    return power(noncentrality, int(kept.sum()) - 1)


@pytest.mark.parametrize("settings", [each for each in COMBINATIONS if each], ids=named)
def test_the_test_sees_each_member_of_a_combination_left_out(settings) -> None:
    """None is idle beside the others, by flat or by sharp logits."""
    for name in settings:
        other = {each: value for each, value in settings.items() if each != name}
        assert max(surely_seen(settings, other, scale) for scale in SCALES.values()) > 0.999, name


@pytest.mark.parametrize("settings", COMBINATIONS, ids=named)
def test_the_test_sees_a_temperature_that_is_off_by_a_fifth(settings) -> None:
    """Its power against that is above 99.9 % in every combination."""
    want = wanted(make_logits(), **settings)
    other = {**settings, "temperature": settings.get("temperature", 1.0) * 1.2}
    tilted = wanted(make_logits(), **other)
    tilted = np.where(want > 0, tilted, 0.0)
    tilted /= tilted.sum()
    kept = want > 0
    noncentrality = DRAWS * float(((tilted - want)[kept] ** 2 / want[kept]).sum())
    assert power(noncentrality, int(kept.sum()) - 1) > 0.999


def test_the_bounds_are_those_of_the_tables() -> None:
    assert quantile(0.05, 10) == pytest.approx(18.307, abs=1e-3)
    assert quantile(0.001, 20) == pytest.approx(45.315, abs=1e-3)
    assert power(0.0, 10) == pytest.approx(FALSE_ALARM, rel=1e-3)
    # Of one degree it is a normal variable beyond a bound on either side.
    shift, bound = 30.0**0.5, quantile(FALSE_ALARM, 1) ** 0.5
    sides = torch.special.ndtr(torch.tensor([shift - bound, -shift - bound], dtype=torch.float64))
    assert power(30.0, 1) == pytest.approx(float(sides.sum()), rel=1e-6)


Plant = Callable[[pytest.MonkeyPatch], None]


def no_top_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topk_topp, "_apply_top_p", lambda logits, top_p: None)


def one_more_by_top_k(patch: pytest.MonkeyPatch) -> None:
    kept = states.SamplingStates.add_request

    def add_request(self, row, params):
        kept(self, row, params)
        self.top_k[row] += 1

    patch.setattr(states.SamplingStates, "add_request", add_request)


def no_min_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "apply_min_p", lambda logits, threshold: None)


def half_of_min_p(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states, "apply_min_p", lambda logits, p: min_p.apply_min_p(logits, p / 2))


def no_temperature(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(states.SamplingStates, "apply_temperature", lambda self, logits, rows: None)


def noise_of_less_scale(patch: pytest.MonkeyPatch) -> None:
    drawn = gumbel.seeded_noise
    patch.setattr(gumbel, "seeded_noise", lambda *arguments: 0.8 * drawn(*arguments))


def one_noise_for_neighbours(patch: pytest.MonkeyPatch) -> None:
    drawn = gumbel.seeded_noise
    patch.setattr(
        gumbel,
        "seeded_noise",
        lambda seeds, positions, tokens, wide: drawn(seeds, positions, tokens // 2, wide),
    )


@pytest.mark.parametrize(
    ("plant", "settings"),
    [
        (no_top_p, {"top_p": 0.85}),
        (no_top_p, SETTINGS),
        (one_more_by_top_k, {"top_k": 12}),
        (no_min_p, {"min_p": 0.06}),
        (no_min_p, {"temperature": 0.7, "min_p": 0.06}),
        (half_of_min_p, {"min_p": 0.06}),
        (no_temperature, {"temperature": 0.7}),
        (no_temperature, SETTINGS),
        (noise_of_less_scale, {}),
        (noise_of_less_scale, SETTINGS),
        (one_noise_for_neighbours, {}),
        (one_noise_for_neighbours, {"temperature": 0.7}),
    ],
)
def test_planted_faults_are_seen(monkeypatch, plant: Plant, settings: dict) -> None:
    plant(monkeypatch)
    assert not follows(settings, seeded=True)
