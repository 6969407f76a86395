# SPDX-License-Identifier: Apache-2.0
"""The planted faults pass wherever the way of every op's case is broken, and are told then."""

import textwrap
from inspect import getsource

import pytest

from parity import canary, golden, op_replay
from parity.calibrate import Floors
from parity.compare import Check, Floor, Result
from vllmx.ir.select import load_ops


def test_every_planted_fault_is_found_and_leaves_no_provider_behind():
    before = {op: dict(load_ops()[op].impls) for op, _ in canary.PLANTED}
    verdict, reason = canary.look()
    assert verdict == "fail"
    assert all(fault.__name__ in reason for _, fault in canary.PLANTED)
    assert "rmse" in reason  # of floats
    assert "bits" in reason  # of what is never rounded
    assert before == {op: load_ops()[op].impls for op, _ in canary.PLANTED}


def accepts(*args, **kwargs):
    """A comparison that finds nothing."""
    return Result({"rmse": Check(0.0, 1.0)})


def silent(source, old, new):
    """A method of `Lane` with a line of it changed."""
    text = textwrap.dedent(getsource(source))
    assert text.count(old) == 1
    found = {}
    exec(text.replace(old, new), vars(op_replay), found)  # as a fault in the file would be
    return found[source.__name__]


BROKEN = {
    "the judge forgets what failed": lambda patch: patch.setattr(
        op_replay.Lane,
        "_judged",
        silent(
            op_replay.Lane._judged,
            "[name for name, check in checks.items() if not check.ok]",
            "[]",
        ),
    ),
    "floats are not compared": lambda patch: patch.setattr(op_replay, "compare_float", accepts),
    "bits are not compared": lambda patch: patch.setattr(op_replay, "compare_exact", accepts),
    "a floor excuses all": lambda patch: patch.setattr(
        Floors, "of", lambda self, *args: Floor(rmse=1e9, row=1e9, worst=1e9, gain=1e9)
    ),
    "the reference is called instead": lambda patch: patch.setattr(
        op_replay,
        "implementation",
        lambda cell: load_ops()[cell.op].impls["torch"],
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_fault_anywhere_on_the_way_is_told(monkeypatch, broken):
    BROKEN[broken](monkeypatch)
    assert canary.look()[0] != "fail"


def test_a_golden_that_is_damaged_is_no_find(monkeypatch):
    monkeypatch.setattr(golden, "read_index", lambda folder: {})
    verdict, reason = canary.look()
    assert verdict == "skip"
    assert "was not judged" in reason
