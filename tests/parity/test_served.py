# SPDX-License-Identifier: Apache-2.0
"""Evidence of an op names the provider that ran, which need not be the one that was asked for."""

import dataclasses

import pytest

from parity.current import weakness
from parity.op_cells import expected, implementation
from parity.op_replay import Lane
from parity.served import HANDED, proof, watched
from parity.status import Cell
from vllmx.ir.select import load_ops

(CELL,) = (
    cell
    for cell in expected("cpu", "op.silu_and_mul/", "cpu")
    if cell.case == "plain" and cell.dtype == "f32"
)


def judged(cell):
    """The row of a cell, and why its pass proves nothing."""
    row = Lane().row(cell)
    asked = Cell(cell.feature, cell.case_name, cell.provider, "cpu", "eager", kind="op")
    return row, weakness(asked, row)


def test_what_ran_is_what_was_asked_for():
    row, weak = judged(CELL)
    assert (row["verdict"], row["proof"]["selected"], weak) == ("pass", "cpu", "")


def test_a_kernel_that_falls_back_inside_proves_nothing(monkeypatch):
    op = load_ops()[CELL.op]
    right = op.impls["cpu"].fn

    def sometimes(x):
        return op.fn(x) if x.numel() else right(x)

    monkeypatch.setattr(op.impls["cpu"], "fn", sometimes)
    monkeypatch.setattr("parity.op_replay.closure_of", lambda cell: {"fine": "", "coarse": ""})
    monkeypatch.setattr("parity.op_replay._symbol", lambda cell: "")
    row, weak = judged(CELL)
    assert row["verdict"] == "pass" and row["proof"]["fallbacks"] == {"torch": 1}
    assert weak == "the provider fell back: {'torch': 1}"
    monkeypatch.setattr(op.impls["cpu"], "fn", op.impls["torch"].fn)
    assert (
        proof("cpu", "", dataclasses.replace(op.impls["cpu"], fn=right), {"torch": 1, "cpu": 0})[
            "selected"
        ]
        == "torch"
    )


def test_what_is_handed_on_is_declared_and_still_is():
    for (op, provider, case), other in HANDED.items():
        (cell,) = (c for c in expected("cpu", f"op.{op}/{case}", provider) if c.dtype == "f32")
        if cell.blocked:
            pytest.fail(f"{cell.name}: {cell.blocked}")
        row, weak = judged(cell)
        assert row["proof"]["handed"] == {other: 1} and weak == ""
        assert "fallbacks" in proof(provider, "plain", implementation(cell), _ran(cell))


def _ran(cell):
    from parity.torch_calls import Call

    case, impl = cell.entry.table.cases[cell.op, cell.case], implementation(cell)
    with watched(impl) as ran:
        Call(cell.entry, case, case.arguments(cell.dtype), impl)()
    return ran
