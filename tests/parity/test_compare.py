# SPDX-License-Identifier: Apache-2.0
"""The comparator: what each rule refuses, and that a comparator without the rule is noticed."""

import importlib.util
import math
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from emulated_ops import scenarios

from parity import compare, policy
from parity.dtypes import Array, array, rounded, ulp

LIMITS = policy.Limits(rmse=2, row=4, ulp=4, gain=8)
RNG = np.random.default_rng(7)
TRUTH = RNG.normal(0, 1, (32, 128))
GOLDEN = array(rounded(TRUTH, "bf16"), "bf16")


def off_by(error: np.ndarray) -> Array:
    return array(GOLDEN.values() + error, "f32")


GOLDEN32 = array(GOLDEN.values(), "f32")
STEP = ulp(TRUTH, "bf16")


def noise(scale: float) -> np.ndarray:
    """Errors of `scale` units in the last place, of either sign."""
    return scale * STEP * np.where(np.random.default_rng(1).random(TRUTH.shape) < 0.5, -1, 1)


def at(place: tuple, value: float) -> np.ndarray:
    error = np.zeros_like(TRUTH)
    error[place] = value
    return error


LEAST, MOST = (
    tuple(int(i) for i in np.unravel_index(place, TRUTH.shape))
    for place in (np.abs(TRUTH).argmin(), np.abs(TRUTH).argmax())
)
NAN_TRUTH = np.where(np.arange(TRUTH.size).reshape(TRUTH.shape) == 5, np.nan, TRUTH)
# rule -> an output that this rule refuses and no other does.
ONLY = {
    "finite": off_by(at(LEAST, math.nan)),
    "rmse": off_by(noise(0.8) - (GOLDEN.values() - TRUTH)),
    "row": off_by(at(np.s_[3], 1) * STEP * 1.3 * np.resize([1, -1], 128)),
    "ulp": off_by(at(MOST, 2 * STEP[MOST])),
    "gain": off_by(TRUTH * 1e-3),
}


def expectations(module: ModuleType) -> list[str]:
    """What a comparator gets wrong; nothing for a sound one."""
    wrong = []

    def expect(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    def judge(x: Array, t: np.ndarray = TRUTH, floor: object = None) -> object:
        return module.compare_float(x, GOLDEN32, t, LIMITS, floor)

    for rule, x in ONLY.items():
        expect(f"{rule} alone", judge(x).failed == [rule])
    expect("the golden passes", judge(GOLDEN32).ok)
    expect("the truth passes", judge(array(TRUTH, "f32")).ok)
    expect("NaN where the truth has none", not judge(off_by(at((0, 0), math.nan))).ok)
    infinite = off_by(at((0, 0), math.inf))
    expect("infinity where the truth has none", not judge(infinite).ok)
    expect("no NaN where the truth has one", not judge(GOLDEN32, NAN_TRUTH).ok)
    with_nan = array(np.where(np.isnan(NAN_TRUTH), np.nan, GOLDEN.values()), "f32")
    expect(
        "NaN where the truth has one",
        module.compare_float(with_nan, with_nan, NAN_TRUTH, LIMITS).ok,
    )
    up = np.where(np.isnan(NAN_TRUTH), np.inf, TRUTH)
    down = array(np.where(np.isnan(NAN_TRUTH), -np.inf, TRUTH), "f32")
    expect(
        "infinity of the wrong sign",
        not module.compare_float(down, array(up, "f32"), up, LIMITS).ok,
    )
    expect("another dtype", not module.compare_float(GOLDEN, GOLDEN32, TRUTH, LIMITS).ok)
    turned = Array("f32", GOLDEN32.data.reshape(128, 32))
    expect("another shape", not module.compare_float(turned, GOLDEN32, TRUTH, LIMITS).ok)
    empty = Array("f32", np.zeros((0, 4), np.float32))
    expect("nothing to compare", not module.compare_exact(empty, empty).ok)
    expect("nothing at all", not module.compare_float(empty, empty, empty.values(), LIMITS).ok)
    expect("no checks are no success", not module.Result().ok)
    expect("a NaN measured", not module.Check(math.nan, 1.0).ok)
    expect("at the limit", module.Check(1.0, 1.0).ok)
    wide = module.Floor(rmse=0.01, row=0.01, worst=0.02, gain=0.01)
    expect("a floor widens", judge(ONLY["rmse"], floor=wide).ok)
    bits = module.compare_exact
    expect("equal bits", bits(GOLDEN32, GOLDEN32).ok)
    expect("one bit", not bits(off_by(at((9, 9), 1e-6)), GOLDEN32).ok)
    ints = Array("i32", np.arange(6, dtype=np.int32))
    expect("one integer", not bits(Array("i32", ints.data + np.int32([0, 0, 0, 0, 0, 1])), ints).ok)
    expect("integers of another width", not bits(Array("i64", ints.data.astype(np.int64)), ints).ok)
    zero = Array("f32", np.zeros(4, np.float32))
    expect("minus zero", not bits(Array("f32", -zero.data), zero).ok)
    payload = Array("f32", np.array([0x7FC00001], np.uint32).view(np.float32))
    expect("NaN of another payload", bits(payload, Array("f32", np.float32([np.nan]))).ok)
    few, many = np.full(1, 3.0), np.full(32, 3.0)
    for numbers, units, holds in ((few, 2, True), (few, 3, False), (many, 2, False)):
        off = array(numbers + units * ulp(numbers, "f32"), "f32")
        told = module.compare_float(off, array(numbers, "f32"), numbers, LIMITS)
        expect(f"{numbers.size} numbers, {units} units off", told.ok is holds)
    biased = array(TRUTH * (1 + 2e-3), "f32")
    expect(
        "true beside a biased golden",
        module.compare_float(array(TRUTH, "f32"), biased, TRUTH, LIMITS).ok,
    )
    expect("golden beside itself", module.compare_float(biased, biased, TRUTH, LIMITS).ok)
    caught = module.teeth(GOLDEN32, judge)
    expect("all teeth", len(caught) == 6 and all(caught.values()))
    blunt = module.teeth(GOLDEN32, lambda x: module.Result({"x": module.Check(0.0, 0.0)}))
    expect("no teeth", not any(blunt.values()))
    expect("a wrong golden", module.golden_fault(array(TRUTH * 1.1, "f32"), TRUTH) is not None)
    expect("a right golden", module.golden_fault(array(TRUTH, "f32"), TRUTH) is None)
    drifting = module.compare_float(
        ONLY["ulp"], GOLDEN32, TRUTH, policy.Limits(9, 9, 9, 99), None, LIMITS
    )
    expect("drift is told, not failed", drifting.ok and drifting.drift == ["ulp"])
    return wrong


def test_the_comparator_does_what_it_should():
    assert expectations(compare) == []


SOURCE = Path(compare.__file__).read_text()
MUTANTS = {
    "limits are never broken": ("self.measured <= self.limit)", "True)"),
    "below, not at the limit": ("self.measured <= self.limit)", "self.measured < self.limit)"),
    "the comparison turned": ("self.measured <= self.limit)", "self.measured >= self.limit)"),
    "NaN measured passes": ("bool(self.measured <= self.limit)", "not self.measured > self.limit"),
    "no checks pass": ("bool(self.checks) and all", "all"),
    "one check is enough": ("and all(check.ok", "and any(check.ok"),
    "NaN and infinity ignored": ("unlike = int((special", "unlike = 0 * int((special"),
    "only the truth's are looked at": (" + (~special & ~np.isfinite(x)).sum()", ""),
    "NaN as a wildcard": (
        "same = (x == t) | (np.isnan(x) & np.isnan(t))",
        "same = ~np.isfinite(x)",
    ),
    "NaN never equal": (" | (np.isnan(x) & np.isnan(t))", ""),
    "ours and golden swapped": ("checks(mine, limits)", "checks(gold, limits)"),
    "no rmse": ('"rmse": Check(_rms(error)', '"rmse": Check(0 * _rms(error)'),
    "few are as many": ("t.size < FEW_ELEMENTS", "t.size < 0"),
    "many are as few": ("FEW_ELEMENTS = 16", "FEW_ELEMENTS = 1 << 20"),
    "no row": ('"row": Check(float(over_row', '"row": Check(0 * float(over_row'),
    "mean of rows": ("over_row.max(initial=0.0)", "over_row.mean()"),
    "no ulp": ('"ulp": Check(float(over_ulp', '"ulp": Check(0 * float(over_ulp'),
    "mean of ulps": ("over_ulp.max(initial=0.0)", "over_ulp.mean()"),
    "no gain": ("bias = min(abs(bias - self.gain), abs(bias))", "bias = 0.0"),
    "gain of the golden only": ("min(abs(bias - self.gain), abs(bias))", "abs(bias - self.gain)"),
    "gain of the truth only": ("min(abs(bias - self.gain), abs(bias))", "abs(bias)"),
    "gain needs a million": ("GAIN_ELEMENTS = 2048", "GAIN_ELEMENTS = 1 << 20"),
    "generous gain": ("GAIN_FLOOR = 2.0**-22", "GAIN_FLOOR = 2.0**-8"),
    "floor ignored": ("floor or Floor()", "Floor()"),
    "sign of the error": ("error = x - self.t", "error = np.maximum(x - self.t, 0)"),
    "layout ignored": ("if layout_fault(x, g) or t.shape != g.shape or", "if"),
    "dtype ignored": ("if x.dtype != g.dtype:", "if False:"),
    "shape ignored": ("if x.shape != g.shape:", "if x.data.size != g.data.size:"),
    "nothing is enough": (" or not g.data.size", ""),
    "any bit equal": ("same.all(axis=-1)", "same.any(axis=-1)"),
    "values, not bits": ("Check(float((~equal).sum()), 0.0)", "Check(float((a != b).sum()), 0.0)"),
    "most bits": ("Check(float((~equal).sum()), 0.0)", "Check(float((~equal).mean() > 0.5), 0.0)"),
    "teeth never bite": ("not judge(copy).ok for", "judge(copy).ok for"),
    "teeth always bite": ("not judge(copy).ok for", "True for"),
    "goldens are always right": ("if error > cap * step:", "if False:"),
    "goldens are always wrong": ("if error > cap * step:", "if True:"),
    "drift fails": ("result.drift = [", "result.checks |= crossed\n        result.drift = ["),
    "drift never told": ("if drift is not None:", "if False:"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_comparator_with_a_fault_is_noticed(name, tmp_path):
    find, replace = MUTANTS[name]
    assert SOURCE.count(find) >= 1, "the mutant names text that is no more"
    path = tmp_path / "mutant.py"
    path.write_text(SOURCE.replace(find, replace).replace("from .", "from parity."))
    spec = importlib.util.spec_from_file_location("parity_mutant", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["parity_mutant"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        with np.errstate(all="ignore"):
            try:
                wrong = expectations(module)
            except (ValueError, IndexError, TypeError, KeyError):
                wrong = ["it raises"]
    finally:
        del sys.modules["parity_mutant"]
    assert wrong, f"{name}: no expectation is broken"


def judged(scenario, values: np.ndarray) -> bool:
    golden = array(scenario.golden, "bf16")
    limits = policy.load().red["norm"]
    return compare.compare_float(array(values, "bf16"), golden, scenario.truth, limits).ok


@pytest.fixture(scope="module")
def emulated():
    """Seed -> its scenarios, each drawn once."""
    return cache(lambda seed: [*scenarios(seed)])


def at_most(refused: int, checks: int) -> float:
    """The rate that `refused` of `checks` bound from above, at 95 % confidence (Clopper-Pearson):
    the one at which so few would come in 5 % of all runs."""

    def so_few(rate: float) -> float:
        terms = (
            math.comb(checks, k) * rate**k * (1 - rate) ** (checks - k) for k in range(refused + 1)
        )
        return math.fsum(terms)

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if so_few(middle) > 0.05 else (low, middle)
    return high


def test_the_bound_of_a_rate_is_the_known_one():
    assert at_most(0, 120) == pytest.approx(1 - 0.05 ** (1 / 120))
    assert at_most(0, 120) > 0.02, "too few to tell half a percent"
    assert at_most(1, 10) == pytest.approx(0.3942, abs=1e-4)


def test_honest_alternatives_are_refused_less_often_than_one_time_in_200(emulated):
    """As many checks as that takes; what they come to stands in docs/parity.md."""
    checks, refused = 0, []
    for seed in range(700, 715):
        for scenario in emulated(seed):
            for name, values in scenario.honest.items():
                checks += 1
                if not judged(scenario, values):
                    refused.append(f"{scenario.name}, seed {seed}: {name}")
    bound = at_most(len(refused), checks)
    assert bound <= 0.005, f"{len(refused)} of {checks} are refused: {refused[:5]}"
    words = f"{len(refused)} of {checks} honest alternates are refused, at most {bound:.1%}"
    told = " ".join((Path(__file__).parents[2] / "docs" / "parity.md").read_text().split())
    assert words in told, f"docs/parity.md does not say: {words}"


def test_planted_faults_do_not_pass(emulated):
    seeds, faults, caught = (700, 701, 702), set(), set()
    for seed in seeds:
        for scenario in emulated(seed):
            op = scenario.name.partition("/")[0]
            for name, values in scenario.faults.items():
                faults.add((seed, op, name))
                if not judged(scenario, values):
                    caught.add((seed, op, name))
    assert len(faults) >= 70 * len(seeds)
    assert len(caught) >= 0.97 * len(faults), sorted(faults - caught)


def test_every_emulated_regime_has_teeth():
    limits = policy.load().red["norm"]
    for scenario in scenarios(703):
        golden = array(scenario.golden, "bf16")
        caught = compare.teeth(
            golden, lambda x, s=scenario, g=golden: compare.compare_float(x, g, s.truth, limits)
        )
        assert len(caught) >= 5 and all(caught.values()), (scenario.name, caught)
