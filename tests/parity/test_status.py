# SPDX-License-Identifier: Apache-2.0
"""A status follows from evidence alone, and nothing that is taken away makes it better."""

import datetime as dt
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity import libraries
from parity.evidence import make_row
from parity.status import RANK, SHOWN, STATUSES, Cell, Feature, Golden, Policy, status

NOW = dt.datetime(2026, 6, 30, tzinfo=dt.UTC)
CODE = {"fine": "f1", "coarse": "c1"}
CELL = Cell("op.x", "plain/f32", "torch", "cpu", "eager", "op", "ops/x", graded=True)
POLICY = Policy(sha="p1")
GOLDENS = {"ops/x": Golden("g1")}


def row(verdict="pass", day=29, cell=CELL, **fields):
    """An evidence row that makes `cell` green unless told otherwise."""
    facts = {
        "feature": cell.feature,
        "case": cell.case,
        "provider": cell.provider,
        "device": {"name": cell.device},
        "mode": cell.mode,
        "golden_sha": "g1",
        "closure": CODE,
        "policy_sha": "p1",
        "oracle": {},
        "verdict": verdict,
        "checks": {},
        "teeth": {"zeros": True},
        "proof": {"selected": cell.provider},
        "run": {"dirty": False},
        "ts": f"2026-06-{day:02}T00:00:00Z",
        **fields,
    }
    if verdict != "pass":
        facts.setdefault("reason", verdict)
    return make_row(**facts)


def feature(*cells, **facts):
    """A built feature of tier T0 with these cells."""
    return Feature("a.b", "T0", "A", "v1/a.py", cells=cells, **{"ours": ("vllmx/a.py",), **facts})


def judged(rows, cells=(CELL,), goldens=GOLDENS, closure=CODE, policy=POLICY, now=NOW, **facts):
    """The ledger row of a feature with `cells`, given `rows`."""
    known = [*cells, *facts.get("watched", ())]
    closures = {cell.key: closure for cell in known} if closure else {}
    (found,) = status([feature(*cells, **facts)], goldens, rows, closures, policy, now)
    return found


def test_a_clean_pass_of_this_code_golden_and_limits_is_green():
    found = judged([row()])
    assert (found.status, found.reason) == ("GREEN", "1 of 1 cells shown")
    assert found.proven == "2026-06-29T00:00:00Z"


@pytest.mark.parametrize(
    ("rows", "facts", "expected", "reason"),
    [
        ([], {}, "UNPROVEN", "no run has looked at it"),
        ([], {"ours": ()}, "MISSING", "not built; tier T0"),
        ([row()], {"absent": ("vllmx/a.py",)}, "MISSING", "not there: vllmx/a.py"),
        ([row()], {"cells": ()}, "UNPROVEN", "no kind of evidence is asked for"),
        ([row()], {"goldens": {}}, "UNPROVEN", "no golden ops/x"),
        ([row()], {"goldens": {"ops/x": Golden("g1", "damaged: cut")}}, "RED", "damaged: cut"),
        ([row()], {"goldens": {"ops/x": Golden("g2")}}, "STALE", "the golden has changed"),
        (
            [row()],
            {"goldens": {"ops/x": Golden("g1", floor=False)}},
            "UNPROVEN",
            "noise of the",
        ),
        ([row()], {"closure": {"fine": "f2", "coarse": "c1"}}, "STALE", "the code has changed"),
        ([row("fail")], {"closure": {"fine": "f2", "coarse": "c1"}}, "STALE", "(was fail)"),
        ([row()], {"closure": None}, "UNPROVEN", "no code here"),
        ([row()], {"closure": {"fine": "f1", "coarse": "c2"}}, "GREEN", "shown"),
        ([row()], {"policy": Policy(sha="p2")}, "STALE", "the limits have changed"),
        ([row()], {"now": NOW + dt.timedelta(days=20)}, "STALE", "last shown 21 days ago"),
        ([row(run={"dirty": True})], {}, "UNPROVEN", "uncommitted changes"),
        ([row(run={})], {}, "UNPROVEN", "uncommitted changes"),
        ([row(proof={"selected": "sdpa"})], {}, "UNPROVEN", "asked for provider torch, sdpa ran"),
        ([row(proof={})], {}, "UNPROVEN", "an unknown one ran"),
        ([row(proof={"selected": "torch", "fallbacks": 2})], {}, "UNPROVEN", "fell back"),
        ([row(teeth={"zeros": False})], {}, "UNPROVEN", "it lets zeros pass"),
        ([row(details={"drift": "row"})], {}, "DRIFT", "row"),
        ([row(details={"fallback": "allclose"})], {}, "YELLOW", "allclose"),
        ([row("skip")], {}, "BLOCKED", "skip"),
        ([row("invalid")], {}, "UNPROVEN", "invalid"),
        ([row("fail")], {}, "RED", "fail"),
        ([row("error")], {}, "RED", "error"),
        ([row(), row("fail", day=28)], {}, "RED", "fail"),
        ([row()], {"lacks": ("this part",)}, "PARTIAL", "this part"),
        ([row("fail")], {"lacks": ("this part",)}, "RED", "fail"),
    ],
)
def test_each_state_has_its_status_and_says_why(rows, facts, expected, reason):
    if "cells" in facts:
        (found,) = status([feature()], GOLDENS, rows, {}, POLICY, NOW)
    else:
        found = judged(rows, **facts)
    assert found.status == expected, found.reason
    words = found.reason + " ".join(cell.reason for cell in found.cells)
    assert reason in words


def test_one_failure_on_a_device_that_may_err_is_suspect_and_two_are_red():
    gpu = Cell("op.x", "plain/f32", "torch", "cuda", "eager", "op", "ops/x", graded=True)
    first = row("fail", cell=gpu)
    assert judged([first], (gpu,)).status == "SUSPECT"
    assert judged([first, row("fail", day=30, cell=gpu)], (gpu,)).status == "RED"
    assert judged([first, row(day=30, cell=gpu)], (gpu,)).status == "SUSPECT"


@pytest.mark.parametrize("details", [{}, {"drift": "row"}, {"fallback": "allclose"}])
def test_whatever_a_clean_run_has_passed_says_when_it_was_last_shown(details):
    found = judged([row(details=details)])
    assert found.status in SHOWN and found.proven == "2026-06-29T00:00:00Z"
    old = row(details=details, closure={"fine": "f0", "coarse": "c0"})
    assert judged([old]).proven == judged([row("fail", details=details)]).proven == ""


def test_a_later_pass_does_not_take_a_failure_back_but_a_retraction_does():
    failure = row("fail", day=20)
    assert judged([failure, row(day=21)]).status == "RED"
    withdrawn = row("retract", day=22, retracts=failure["id"], reason="issue 7")
    assert judged([failure, row(day=21), withdrawn]).status == "GREEN"


def test_a_failure_is_over_once_other_code_changed_and_it_passed_then():
    failure = row("fail", day=20, closure={"fine": "f1", "coarse": "c0"})
    assert judged([failure]).status == "RED"
    assert judged([failure, row(day=21, closure={"fine": "f1", "coarse": "c0"})]).status == "RED"
    assert judged([failure, row(day=21)]).status == "GREEN"
    back = {"fine": "f1", "coarse": "c0"}
    assert judged([failure, row(day=21)], closure=back).status == "RED"


def test_a_failure_is_not_over_for_a_pass_with_uncommitted_changes():
    failure = row("fail", day=20, closure={"fine": "f1", "coarse": "c0"})
    before = row(day=19, closure={"fine": "f1", "coarse": "c0"})
    assert judged([before, failure, row(day=21, run={"dirty": True})]).status == "RED"


@pytest.mark.parametrize(
    ("provider", "selected", "expected"),
    [
        ("torch", {"linear": "torch", "rms_norm": "torch"}, "GREEN"),
        ("torch", {"linear": "torch", "rms_norm": "native"}, "UNPROVEN"),
        ("torch", {}, "UNPROVEN"),
        ("torch", "", "UNPROVEN"),
        ("auto", {"linear": "fbgemm", "rms_norm": "native"}, "GREEN"),
        ("auto", {}, "UNPROVEN"),
    ],
)
def test_a_model_shows_only_the_provider_that_served_its_ops(provider, selected, expected):
    cell = Cell("model.x", "forced", provider, "cpu", "bs1", "model", "ops/x", graded=True)
    assert judged([row(cell=cell, proof={"selected": selected})], (cell,)).status == expected


def test_a_renamed_provider_is_not_green():
    other = Cell("op.x", "plain/f32", "renamed", "cpu", "eager", "op", "ops/x", graded=True)
    assert judged([row()], (other,)).status == "UNPROVEN"


def test_failures_of_a_provider_that_nobody_asked_for_count_and_passes_do_not():
    other = Cell("op.x", "plain/f32", "triton", "cpu", "eager", "op", "ops/x", graded=True)
    closures = {CELL.key: CODE, other.key: CODE}
    for verdict, expected, cells in (("fail", "RED", 2), ("pass", "GREEN", 1)):
        rows = [row(), row(verdict, cell=other)]
        (found,) = status([feature(CELL)], GOLDENS, rows, closures, POLICY, NOW)
        assert (found.status, len(found.cells)) == (expected, cells)
        assert [cell.status for cell in found.beside] == ["GREEN"] * (2 - cells)


@pytest.mark.parametrize("other", ["provider", "device", "mode"])
@pytest.mark.parametrize(
    ("verdict", "code", "expected"),
    [
        ("pass", CODE, "GREEN"),
        ("pass", {"fine": "f0", "coarse": "c0"}, "STALE"),
        ("fail", {"fine": "f0", "coarse": "c0"}, "STALE"),
        ("skip", CODE, "BLOCKED"),
        ("invalid", CODE, "UNPROVEN"),
        ("fail", CODE, "RED"),
    ],
)
def test_what_nobody_asks_for_is_shown_beside_or_counts_as_bad_never_both(
    other, verdict, code, expected
):
    cell = replace(CELL, **{other: "another"})
    policy = replace(POLICY, repeatable=("cpu", "another"))
    closures = {CELL.key: CODE, cell.key: CODE}
    rows = [row(), row(verdict, cell=cell, closure=code)]
    (found,) = status([feature(CELL)], GOLDENS, rows, closures, policy, NOW)
    bad = expected == "RED"
    assert (found.status, len(found.cells)) == (("RED", 2) if bad else ("GREEN", 1))
    assert [c.status for c in found.beside] == ([] if bad else [expected])


OTHER = Cell("op.x", "plain/f32", "fast", "cpu", "eager", "op", "ops/x", graded=True)


def refusing(rows, reason="takes no float16", **facts):
    """The row of a feature one of whose providers refuses now what it may have taken once."""
    refusals = {OTHER.key: reason} if reason else {}
    known = {CELL.key: CODE, OTHER.key: CODE}
    wanted = [feature(CELL, **facts)]
    (found,) = status(wanted, GOLDENS, rows, known, POLICY, NOW, refusals)
    return found


def test_a_provider_that_starts_to_refuse_does_not_lose_its_cells_silently():
    shown = [row(), row(cell=OTHER, day=20)]
    found = refusing(shown)
    assert (found.status, found.lost, found.beside) == ("UNPROVEN", 1, ())
    assert "lost: takes no float16; it passed at 2026-06-20T00:00:00Z" in found.reason
    assert found.counts == {"GREEN": 1, "UNPROVEN": 1}
    # Of another code as well: it is not what is here that is asked for.
    old = row(cell=OTHER, day=20, closure={"fine": "f0", "coarse": "c0"})
    assert refusing([row(), old]).lost == 1
    # What it could be run again, never passed, or was declared to be given up, is not lost.
    assert refusing(shown, "").status == "GREEN"
    assert refusing([row()]).status == "GREEN"
    assert refusing([row(), row("skip", cell=OTHER)]).status == "GREEN"
    assert refusing([row(), row(cell=OTHER, run={"dirty": True})]).status == "GREEN"
    assert refusing(shown, dropped=(("op.x", "fast"),)).status == "GREEN"
    assert refusing(shown, dropped=(("op.x", "other"), ("op.y", "fast"))).lost == 1
    wrong = row("fail", cell=OTHER, day=21, closure={"fine": "f0", "coarse": "c0"})
    assert refusing([*shown[:1], old, wrong]).lost == 1


GONE = Cell("op.x", "ties/f32", "torch", "cpu", "eager", "op", "ops/x", graded=True)


@pytest.mark.parametrize(
    ("last", "expected"), [("pass", "UNPROVEN"), ("skip", "UNPROVEN"), ("fail", "RED")]
)
def test_a_case_that_is_asked_for_no_more_is_lost_and_red_if_it_failed(last, expected):
    """Whatever its code was: taking a case away is no way to turn a row green."""
    old = row(last, cell=GONE, day=20, closure={"fine": "f0", "coarse": "c0"})

    def found(*rows, **facts):
        wanted = [feature(CELL, **facts)]
        return status(wanted, GOLDENS, [row(), *rows], {CELL.key: CODE}, POLICY, NOW)[0]

    assert (found(old).status, found(old).lost) == (expected, 1)
    assert f"nothing asks for it any more; it was {last}" in found(old).reason
    assert found(row(last, cell=GONE, run={"dirty": True})).status == "GREEN"
    assert found(old, dropped=(("op.x", "ties/f32"),)).status == "GREEN"
    assert found(row(last, cell=replace(GONE, feature="op.y"))).status == "GREEN"


def test_evidence_of_another_version_of_a_library_that_decides_is_stale():
    versions = {"cpu": {"torch": "2.13.0", "triton": "3.9.0"}}
    policy = Policy(sha="p1", versions=versions)

    def of(cell=CELL, **run):
        found = judged([row(cell=cell, run={"dirty": False, **run})], cells=(cell,), policy=policy)
        return found.status, found.reason

    assert of(torch="2.13.0")[0] == of(torch="2.13.0+cpu")[0] == of()[0] == "GREEN"
    found, reason = of(torch="2.12.1+cpu")
    assert found == "STALE" and "torch was 2.12.1+cpu, evidence is wanted of 2.13.0" in reason
    # Only where it decides, and on the device that it is named for.
    assert of(torch="2.13.0", triton="3.4.0")[0] == "GREEN"
    kernel = Cell("op.x", "plain/f32", "triton", "cpu", "eager", "op", "ops/x", graded=True)
    assert of(kernel, triton="3.4.0")[0] == "STALE"
    gpu = Cell("op.x", "plain/f32", "torch", "cuda", "eager", "op", "ops/x", graded=True)
    assert of(gpu, torch="2.12.1")[0] == "GREEN"
    test = Cell("a.b", "tests/t.py", "vllmx", "cpu", "pytest", "test")
    assert libraries.of_kind("test", "vllmx", "cpu") == test.libraries == ()


def test_a_failure_with_another_library_is_not_held_against_this_one():
    policy = Policy(sha="p1", versions={"cpu": {"torch": "2.13.0"}})
    bad = row("fail", day=20, run={"dirty": False, "torch": "2.12.0"})
    good = row(run={"dirty": False, "torch": "2.13.0"})
    assert judged([bad], policy=policy).status == "STALE"
    assert judged([bad, good], policy=policy).status == "GREEN"
    assert judged([bad, good]).status == "RED"


def test_a_planted_fault_that_nothing_finds_keeps_a_row_from_green_and_all_are_counted():
    mutants = tuple(Cell("mutant.m", str(n), "vllmx", "cpu", "planted", "mutant") for n in range(4))
    plain = {"golden_sha": "", "teeth": {}}
    found = [row(cell=mutants[0], **plain), row(cell=mutants[1], **plain)]
    result = judged([row(), *found], watched=mutants)
    assert (result.status, result.kills) == ("GREEN", (2, 4))
    result = judged([row(), *found, row("fail", cell=mutants[2], **plain)], watched=mutants)
    assert (result.status, result.kills) == ("YELLOW", (2, 4))
    assert "mutant.m" in result.reason
    assert judged([row("fail"), *found], watched=mutants).status == "RED"


def test_a_refused_honest_alternate_is_red_and_no_fault_that_was_found():
    honest = (Cell("mutant.h", "x", "vllmx", "cpu", "honest", "mutant"),)
    plain = {"golden_sha": "", "policy_sha": ""}
    good = judged([row(), row(cell=honest[0], **plain)], watched=honest)
    assert (good.status, good.kills) == ("GREEN", (0, 0))
    bad = judged([row(), row("fail", cell=honest[0], **plain)], watched=honest)
    assert bad.status == "RED" and bad.reason == "honest alternates that are refused: mutant.h"


def test_honest_alternates_are_of_the_comparison_and_are_of_halves_too():
    from parity.catalogue import COMPARISON_FILE, Listed
    from parity.features import load
    from parity.mutate import catalogue

    honest = {f"mutant.{mutant.name}" for mutant in catalogue() if mutant.honest}
    from parity.checkout import ROOT

    listed = Listed(ROOT)
    watched = listed.mutants([COMPARISON_FILE])
    assert {cell.feature for cell in watched if cell.mode == "honest"} == honest
    assert all(listed.closure(cell) for cell in watched)
    assert honest.isdisjoint(cell.feature for cell in listed.mutants(["vllmx/ir/ops/linear.py"]))
    assert [row.id for row in load() if COMPARISON_FILE in row.ours] == ["suite.op"]
    assert {"mutant.linear-split-k-halves", "mutant.linear-bias-after-rounding"} <= honest


def test_a_probe_counts_only_if_it_is_broken():
    law = Cell("op.x", "rows:plain/f32", "torch", "cpu", "probe", "probe")
    plain = {"golden_sha": "", "teeth": {}}
    for rows, expected, cells in (
        ([], "GREEN", 1),
        ([row(cell=law, **plain)], "GREEN", 1),
        ([row("fail", cell=law, **plain)], "RED", 2),
    ):
        found = judged([row(), *rows], watched=(law,))
        assert (found.status, len(found.cells), found.kills) == (expected, cells, (0, 0))


def test_headroom_is_the_tightest_check():
    checks = {"rmse": {"measured": 1.0, "limit": 2.0, "headroom": 2.0}}
    checks["row"] = {"measured": 2.0, "limit": 3.0, "headroom": 1.5}
    assert judged([row(checks=checks)]).headrooms == (1.5, 1.5)


# ---------------------------------------------------------------------- for all evidence

ROWS = st.builds(
    lambda verdict, day, fine, coarse, golden, policy, dirty, selected, device: row(
        verdict,
        day,
        closure={"fine": fine, "coarse": coarse},
        golden_sha=golden,
        policy_sha=policy,
        run={"dirty": dirty},
        proof={"selected": selected},
        device={"name": device},
    ),
    verdict=st.sampled_from(["pass", "pass", "pass", "fail", "error", "skip", "invalid"]),
    day=st.integers(1, 29),
    fine=st.sampled_from(["f1", "f1", "f0"]),
    coarse=st.sampled_from(["c1", "c0"]),
    golden=st.sampled_from(["g1", "g1", "g0"]),
    policy=st.sampled_from(["p1", "p1", "p0"]),
    dirty=st.booleans(),
    selected=st.sampled_from(["torch", "torch", "sdpa"]),
    device=st.sampled_from(["cpu", "cuda"]),
)
CELLS = (CELL, Cell("op.x", "plain/f32", "torch", "cuda", "eager", "op", "ops/x", graded=True))


def rank(rows):
    """How far from green the rows leave the feature."""
    return RANK[judged(rows, CELLS).status]


@given(st.lists(ROWS, max_size=8))
@settings(max_examples=150, deadline=None)
def test_green_needs_a_clean_current_pass_of_every_cell(rows):
    found = judged(rows, CELLS)
    if found.status in ("GREEN", "DRIFT", "YELLOW"):
        for cell in found.cells:
            decided = cell.row
            assert decided["verdict"] == "pass" and not decided["run"]["dirty"]
            assert decided["closure"]["fine"] == "f1" and decided["golden_sha"] == "g1"
            assert decided["policy_sha"] == "p1" and decided["proof"]["selected"] == "torch"
            assert decided["device"]["name"] == cell.cell.device


@given(st.lists(ROWS, max_size=8), st.randoms())
@settings(max_examples=100, deadline=None)
def test_the_order_of_evidence_does_not_matter(rows, random):
    shuffled = list(rows)
    random.shuffle(shuffled)
    assert judged(rows, CELLS) == judged(shuffled, CELLS)


@given(st.lists(ROWS, min_size=1, max_size=8), st.data())
@settings(max_examples=200, deadline=None)
def test_deleting_a_pass_never_makes_it_better(rows, data):
    index = data.draw(st.integers(0, len(rows) - 1))
    if rows[index]["verdict"] == "pass":
        rest = [r for r in rows if r["id"] != rows[index]["id"]]
        assert rank(rest) >= rank(rows)


@given(st.lists(ROWS, max_size=8), ROWS)
@settings(max_examples=200, deadline=None)
def test_adding_a_failure_never_makes_it_better(rows, extra):
    if extra["verdict"] in ("fail", "error"):
        assert rank([*rows, extra]) >= rank(rows)


@given(st.lists(ROWS, max_size=8))
@settings(max_examples=100, deadline=None)
def test_a_missing_golden_or_code_is_never_green(rows):
    assert judged(rows, CELLS, goldens={}).status not in ("GREEN", "DRIFT", "YELLOW")
    assert judged(rows, CELLS, closure=None).status not in ("GREEN", "DRIFT", "YELLOW")
    assert judged([], CELLS).status == "UNPROVEN"


def test_every_status_has_a_rank():
    assert set(RANK) == set(STATUSES)
