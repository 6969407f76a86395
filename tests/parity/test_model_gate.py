# SPDX-License-Identifier: Apache-2.0
"""The gate of whole models: what each rule refuses, and that a gate without the rule is noticed."""

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import yaml

from parity import model_gate, policy
from parity.model_golden import Scores
from parity.model_table import MODELS

LIMITS = policy.load().models["torch"]
LOOSE = policy.load().models["auto"]
LENGTHS = (17, 40, 181, 181, 181, 301)
K = 32
RNG = np.random.default_rng(5)


def scores(val: np.ndarray, ids: np.ndarray) -> Scores:
    offsets = np.concatenate(([0], np.cumsum(LENGTHS)))
    tokens = np.zeros(offsets[-1], np.int32)
    stream = np.zeros((1, 1, 64), np.float32)
    following = val[:, 1]
    return Scores(tokens, offsets, ids, val, following, ids[:, 0], stream, {}, "0" * 64)


def made() -> tuple[Scores, Scores]:
    """(golden, floor): peaked distributions over 895 positions, a nearly flat one, near ties."""
    n = sum(LENGTHS) - len(LENGTHS)
    raw = np.sort(RNG.normal(0, 2.5, (n, 64)), axis=1)[:, ::-1]
    raw[:, 0] += 0.5
    raw[7] = np.linspace(0.01, 0, 64)
    logs = raw - np.log(np.exp(raw).sum(axis=1, keepdims=True))
    val = logs[:, :K].copy()
    ids = np.tile(np.arange(K, dtype=np.int32), (n, 1)) + 3
    floor = val + RNG.normal(0, 1e-5, val.shape)
    return scores(val, ids), scores(floor, ids)


WANT, FLOOR = made()
GOOD = model_gate.Ours(np.arange(len(WANT.next)), WANT.ids, WANT.val.copy(), WANT.next.copy())
SURE = int((WANT.val[:, 0] - WANT.val[:, 1]).argmax())
PLACES = WANT.places
BOUNDARY = np.flatnonzero((PLACES > 0) & (PLACES % 16 == 0))
LONG = np.flatnonzero(PLACES >= 128)


def moved(rows: object, by: float, column: object = slice(None)) -> model_gate.Ours:
    """The golden with some log-probabilities moved, those of what follows with them."""
    val, following = GOOD.val.copy(), GOOD.next.copy()
    val[rows, column] += by
    if column == slice(None):
        following[rows] += by
    return dataclasses.replace(GOOD, val=val, next=following)


def flipped(rows: list[int], margin: float, **changes: float) -> model_gate.Ours:
    """The golden with its first two tokens exchanged, ours the likelier by `margin`."""
    ids, val = GOOD.ids.copy(), GOOD.val.copy()
    for row in rows:
        ids[row, :2] = ids[row, 1::-1]
        val[row, 0], val[row, 1] = val[row, 1] + margin, val[row, 1]
    return dataclasses.replace(GOOD, ids=ids, val=val, **changes)


def expectations(module: ModuleType) -> list[str]:
    """What a gate gets wrong; nothing for a sound one."""
    wrong = []

    def failed(got: object, want=WANT, floor=FLOOR, limits=LIMITS) -> set[str]:
        own = module.Ours(got.where, got.ids, got.val, got.next, got.ulp, got.block)
        found = module.judge(want, floor, own, limits)
        return {name for name, check in found.items() if not check.ok}

    def expect(what: str, holds: bool) -> None:
        if not holds:
            wrong.append(what)

    expect("the golden passes", failed(GOOD) == set())
    expect("the other oracle passes", failed(dataclasses.replace(GOOD, val=FLOOR.val)) == set())
    expect("mean", "mean" in failed(moved(slice(None), 2e-4)))
    signs = np.resize([1.0, -1.0], len(GOOD.next))[:, None]
    both = dataclasses.replace(GOOD, val=GOOD.val + 2e-4 * signs)
    expect("mean has no sign", "mean" in failed(both))
    few = np.arange(0, len(GOOD.next), 60)
    expect("p99", "p99" in failed(moved(few, -0.002, 0)))
    rare = [SURE, 20, 300]
    expect("exceedance", "exceedance" in failed(moved(rare, -1.5, 0)))
    expect("exceedance of one", "exceedance" not in failed(moved(rare[:1], -1.5, 0)))
    expect("next", "next" in failed(dataclasses.replace(GOOD, next=GOOD.next - 0.01)))
    expect("finite", "finite" in failed(moved([5], math.nan, 0)))
    expect("missing", "missing" in failed(dataclasses.replace(GOOD, ids=GOOD.ids + 500)))

    # However far two oracles are from each other.
    apart = dataclasses.replace(FLOOR, val=WANT.val - 1.0)
    expect("mean cap", "mean" in failed(moved(slice(None), -0.07), floor=apart))
    expect("under the cap", "mean" not in failed(moved(slice(None), -0.05), floor=apart))
    expect("p99 cap", "p99" in failed(moved(few, -0.3, 0), floor=apart))

    # Near ties.
    expect("a sure flip", "flips" in failed(flipped([SURE], 1.0)))
    expect("we were not sure", "flips" not in failed(flipped([SURE], 1e-5)))
    close = dataclasses.replace(WANT, val=WANT.val.copy())
    close.val[SURE, 1] = close.val[SURE, 0] - 1e-5
    expect("it was not sure", "flips" not in failed(flipped([SURE], 1.0), want=close))
    expect("0.01 is no tie in float32", "flips" in failed(flipped([SURE], 0.01)))
    expect("0.01 is one in float16", "flips" not in failed(flipped([SURE], 0.01), limits=LOOSE))
    expect("two units of bfloat16", "flips" not in failed(flipped([SURE], 0.1, ulp=0.0625)))
    expect("more than two units", "flips" in failed(flipped([SURE], 0.15, ulp=0.0625)))
    noisy = dataclasses.replace(FLOOR, val=FLOOR.val.copy())
    noisy.val[:, 0] += np.resize([0.02, -0.02], len(noisy.val))
    expect("four deviations", "flips" not in failed(flipped([SURE], 0.06), floor=noisy))
    expect("beyond four deviations", "flips" in failed(flipped([SURE], 0.1), floor=noisy))
    wild = flipped([SURE], 0.5, ulp=10.0)
    expect("the cap of a tie", "flips" in failed(wild))
    flat = flipped([7], 1.5, ulp=10.0)
    wide = dataclasses.replace(WANT, val=WANT.val.copy())
    wide.val[7, 0] = -4.0
    wide.val[7, 1] = -5.5
    expect("the cap is wide where all is unsure", "flips" not in failed(flat, want=wide))
    unlisted = flipped([SURE], 1.0)
    unlisted.ids[SURE, 0] = 900
    expect("a token beyond the oracle's list", "flips" in failed(unlisted))
    ties = [int(row) for row in np.arange(3, 3 + 8 * 30, 30)]
    expect("ties are counted", "ties" in failed(flipped(ties, 1e-5)))
    expect("a few are allowed", "ties" not in failed(flipped(ties[:4], 1e-5)))
    restless = dataclasses.replace(FLOOR, top=FLOOR.top.copy())
    restless.top[ties] += 1
    expect("as the oracles' own", "ties" not in failed(flipped(ties, 1e-5), floor=restless))
    many = list(range(0, len(GOOD.next), 18))
    expect("exact", "unlike" in failed(flipped(many, 1e-5)))
    expect("exact of most", "unlike" not in failed(flipped(many[::3], 1e-5)))

    # Mass, and the distance from a third party.
    peaked = np.exp(WANT.val).sum(axis=1) >= 0.6
    expect("coverage", "coverage" in failed(moved(peaked, -1.0)))
    expect("flat positions", "coverage" not in failed(moved([7], -1.0)) and not peaked[7])
    expect("kl", "kl" in failed(moved(slice(None), -0.02)))
    away = dataclasses.replace(FLOOR, val=WANT.val - 0.02)
    expect("as far as upstream is no fault", "kl" not in failed(GOOD, floor=away))
    closer = dataclasses.replace(GOOD, val=WANT.val.copy())
    biased = dataclasses.replace(WANT, val=WANT.val - 0.02, next=WANT.next)
    true = dataclasses.replace(FLOOR, val=WANT.val)
    expect("nearer than upstream is no fault", "kl" not in failed(closer, biased, true))

    # Classes: a little, in one of them only, that the whole does not show.
    whole = {"mean", "p99", "exceedance", "next"}
    edge = failed(moved(BOUNDARY, -1.2e-3))
    expect("boundary", {"boundary.mean", "boundary.next"} <= edge)
    quiet = failed(moved(BOUNDARY, -3e-4))
    expect("only the class", "boundary.mean" in quiet and not quiet & whole)
    expect("not at place 0", "boundary.mean" not in failed(moved(PLACES == 0, -0.0012)))
    expect("not in the middle", "boundary.mean" not in failed(moved(PLACES % 16 == 8, -0.0012)))
    far = failed(moved(LONG[::3], -3.5e-4))
    expect("long", "long.mean" in far)
    expect("not before it", "long.mean" not in failed(moved(PLACES < 128, -0.01)))
    expect("long flips", "long.flips" in failed(flipped([int(LONG[0])], 1.0)))
    short = GOOD.only(np.flatnonzero(PLACES < 16))
    expect("absent classes", not any("." in n for n in module.judge(WANT, FLOOR, short, LIMITS)))
    few_rows = GOOD.only(np.flatnonzero(PLACES < 100))
    names = module.judge(WANT, FLOOR, few_rows, LIMITS)
    expect("no percentile of a few", "boundary.p99" not in names and "boundary.mean" in names)
    start = np.flatnonzero(PLACES < 20)
    one = flipped([int(np.flatnonzero(PLACES == 16)[0])], 1e-5).only(start)
    expect("one flip of a few", "boundary.unlike" not in failed(one))

    # A model's own blocks: a third of the boundaries of 16 tokens, where each must be seen.
    own = np.flatnonzero((PLACES > 0) & (PLACES % 48 == 0))
    seen = dataclasses.replace(moved(own, -2e-4), block=48)
    expect("own blocks", "boundary.mean" in failed(seen))
    expect("blocks of others", "boundary.mean" not in failed(moved(own, -2e-4)))

    # A floor that is measured between two lanes of which neither is the golden.
    far = dataclasses.replace(WANT, val=WANT.val + 0.02 * np.resize([1, -1], (len(WANT.val), 1)))
    between = dataclasses.replace(far, val=far.val + RNG.normal(0, 1e-5, far.val.shape), base=far)
    expect("a floor from its base", "mean" in failed(moved(slice(None), 2e-4), floor=between))
    expect("the golden passes with a base", failed(GOOD, floor=between) == set())
    # Margins of the base that are off by what excuses a flip, as those of its floor are.
    wide_margins = dataclasses.replace(noisy, val=noisy.val + RNG.normal(0, 1e-5, noisy.val.shape))
    alike = dataclasses.replace(wide_margins, base=noisy)
    expect("ties by the base", "flips" in failed(flipped([SURE], 0.06), floor=alike))
    tops = far.top.copy()
    tops[ties] += 1
    turned = dataclasses.replace(between, top=tops, base=dataclasses.replace(far, top=tops))
    expect("flips by the base", "ties" in failed(flipped(ties, 1e-5), floor=turned))
    nearer = dataclasses.replace(FLOOR, val=biased.val, base=WANT)
    expect("kl from the base", "kl" not in failed(GOOD, biased, nearer))

    # The error of a mean of values that are alike within a sequence.
    owners = np.repeat(np.arange(30), 30)
    swing = np.tile(np.resize([1.0, -1.0], 30), 30)
    expect("sums within sequences", module.standard_error(swing, owners) < 1e-3)
    alike = np.repeat(RNG.normal(size=30), 30)
    alone = float(alike.std()) / 30
    expect("never wider", math.isclose(module.standard_error(alike, owners), alone))
    return wrong


def test_the_gate_does_what_it_says() -> None:
    assert expectations(model_gate) == []


SOURCE = Path(model_gate.__file__).read_text(encoding="utf-8")
# What a slip of the gate would be: (text, text in its place); each has to break an expectation.
MUTANTS = {
    "signed differences": ("differences = np.abs(ours - val)", "differences = ours - val"),
    "no mean": ("Check(float(seen.mean()), mean_limit)", "Check(0.0, mean_limit)"),
    "median": ("Check(float(seen.mean()), mean_limit)", "Check(float(np.median(seen)), 1.0)"),
    "no cap of the mean": (", limits.mean_cap)", ", 1e9)"),
    "no cap of p99": (", limits.p99_cap)", ", 1e9)"),
    "p50": ("float(np.quantile(known, 0.99))", "float(np.quantile(known, 0.5))"),
    "no exceedance": ("count = int((", "count = 0 * int(("),
    "exceedance of none": ("float(max(binomial_bound(n, floor_count / n), 1))", "0.0"),
    "missing is fine": ("missing = int(np.isnan(ours).sum())", "missing = 0"),
    "not finite is fine": ("float(not np.isfinite(got.val[:, 0]).all() or not len(seen))", "0.0"),
    "next ignored": ("np.abs(got.next - want.next[at]).mean()", "0.0"),
    "flips ignored": ("unexcused += min(", "unexcused += 0 * min("),
    "our side only": ("min(oracle_margin, own_margin)", "own_margin"),
    "its side only": ("min(oracle_margin, own_margin)", "oracle_margin"),
    "both must be unsure": ("min(oracle_margin, own_margin)", "max(oracle_margin, own_margin)"),
    "no cap of a tie": ("> min(tie, cap)", "> tie"),
    "the cap alone": ("> min(tie, cap)", "> cap"),
    "a cap that is not flat": ("cap = 0.30 + 0.35 * -float(want.val[row][0])", "cap = 0.30"),
    "no units of logits": ("max(2 * got.ulp, 4 * sigma", "max(0.0, 4 * sigma"),
    "ten units": ("2 * got.ulp", "10 * got.ulp"),
    "no deviations": ("4 * sigma, limits.tie", "limits.tie"),
    "ten deviations": ("4 * sigma", "10 * sigma"),
    "0.05 for all": ("4 * sigma, limits.tie)", "4 * sigma, 0.05)"),
    "any token is listed": (
        "len(place) else want.val[row][-1])",
        "len(place) else want.val[row][0])",
    ),
    "ties not counted": ("Check(float(excused)", "Check(0.0"),
    "no tie allowed": ("max(floor_rate, 1 / n)", "0.0"),
    "ties as often as you like": ("max(floor_rate, 1 / n)", "1.0"),
    "the oracles' flips ignored": ("max(floor_rate, 1 / n)", "1 / n"),
    "exact ignored": ("Check(len(flipped) / max(n, 1), unlike)", "Check(0.0, unlike)"),
    "exact to the last": ("wanted = max(0.95, 1.0 - floor_rate - 0.02)", "wanted = 1.0"),
    "no coverage": ("return int(((theirs >= COVERAGE)", "return 0 * int(((theirs >= COVERAGE)"),
    "coverage of the flat": ("(theirs >= COVERAGE) & (mine", "(theirs >= 0) & (mine"),
    "no kl": ("Check(max(float(paired.mean()), 0.0)", "Check(0.0"),
    "kl without a baseline": (" - _kl(truth, val)", ""),
    "kl of either sign": ("max(float(paired.mean()), 0.0)", "abs(float(paired.mean()))"),
    "positions are independent": ("return min(alone, together)", "return alone"),
    "sequences alone": ("return min(alone, together)", "return together"),
    "no classes": ("in classes(want, got.where, got.block).items():", "in ():"),
    "boundary everywhere": ("(places % block == 0)", "(places % 1 == 0)"),
    "boundary one late": ("(places % block == 0)", "(places % block == 1)"),
    "boundary at the beginning": ("(places > 0) & ", ""),
    "blocks of 16 for all": ("got.where, got.block)", "got.where)"),
    "a floor from the golden": ("floor.val[at] - base.val[at]", "floor.val[at] - val"),
    "kl from the floor": ("(floor.base or floor).val[at]", "floor.val[at]"),
    "a tie from the golden": ("(floor.base or want, floor)", "(want, floor)"),
    "flips from the golden": ("!= base.top[at])", "!= theirs)"),
    "long from the middle": ("places >= LONG", "places >= 32"),
    "long never": ("places >= LONG", "places > 10**6"),
    "classes by the whole": ("got.only(rows), limits)", "got, limits)"),
    "a percentile of a few": ('found.pop("p99", None)', "pass"),
    "one flip is too many": ("max(1.0 - wanted, 1 / max(n, 1))", "1.0 - wanted"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_gate_with_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    find, replace = MUTANTS[name]
    assert SOURCE.count(find) >= 1, "the mutant names text that is no more"
    path = tmp_path / "mutant.py"
    path.write_text(SOURCE.replace(find, replace).replace("from .", "from parity."))
    spec = importlib.util.spec_from_file_location("gate_mutant", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gate_mutant"] = module
    try:
        spec.loader.exec_module(module)
        with np.errstate(all="ignore"):
            try:
                wrong = expectations(module)
            except (ValueError, IndexError, TypeError, KeyError):
                wrong = ["it raises"]
    finally:
        del sys.modules["gate_mutant"]
    assert wrong, f"{name}: no expectation is broken"


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_asked_positions_of_every_class(name: str) -> None:
    from parity.model_golden import load

    want, floor = load(MODELS[name])
    found = model_gate.classes(want, np.arange(len(want.next)))
    assert len(found["boundary"]) >= 40 and len(found["long"]) >= 11
    if MODELS[name].dtype != "float32":
        return
    got = model_gate.Ours(np.arange(len(want.next)), want.ids, want.val, want.next)
    # What the policy says of float32: two oracles move no margin by as much as its least tie.
    assert model_gate.tie_of(want, floor, got, LIMITS) == LIMITS.tie == 0.001


def test_no_limit_of_whole_models_is_wider_than_it_was() -> None:
    was = {
        "torch": (1.5, 2, 0.0001, 0.0005, 0.06, 0.20, 0.001, 0, 0.00002),
        "auto": (1.5, 2, 0.02, 0.05, 0.06, 0.20, 0.05, 0.02, 0.005),
        "auto-cuda": (1.5, 2, 0.0001, 0.0005, 0.06, 0.20, 0.001, 0, 0.00002),
    }
    for provider, values in yaml.safe_load(policy.POLICY.read_text())["models"].items():
        assert all(now <= then for now, then in zip(values.values(), was[provider], strict=True))
