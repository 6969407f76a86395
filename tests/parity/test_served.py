# SPDX-License-Identifier: Apache-2.0
"""Evidence of an op names the provider that ran, which need not be the one that was asked for."""

import dataclasses

import pytest
import torch

from parity.current import weakness
from parity.op_cells import expected
from parity.op_replay import Lane
from parity.served import proof
from parity.status import Cell
from vllmx.ir.op import OpContext
from vllmx.ir.ops.layernorm import WHOLE_ROWS_ONLY
from vllmx.ir.select import load_ops
from vllmx.kernels.flashinfer_ops import NEEDS_WEIGHT

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
        proof("cpu", dataclasses.replace(op.impls["cpu"], fn=right), {"torch": 1, "cpu": 0})[
            "selected"
        ]
        == "torch"
    )


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("provider", ["cpu", "native", "flashinfer"])
def test_norms_of_a_part_are_refused_by_name_where_a_kernel_has_none(op, provider):
    impl = load_ops()[op].impls[provider]
    facts = impl.op.facts_of(weight=torch.ones(8), variance_size=4)
    assert impl.supports(OpContext("cpu", torch.float32, facts)) == WHOLE_ROWS_ONLY
    rows = {"x": torch.ones(2, 8), "x_residual": torch.ones(2, 8)}
    with pytest.raises(ValueError, match=WHOLE_ROWS_ONLY):
        given = list(rows.values())[: 2 if op.startswith("fused") else 1]
        impl.fn(*given, impl.prepared(torch.ones(8)), 1e-6, 4)


def test_flashinfers_norms_without_weight_are_refused_by_name():
    impl = load_ops()["rms_norm"].impls["flashinfer"]
    facts = impl.op.facts_of(weight=None, variance_size=None)
    assert impl.supports(OpContext("cuda", torch.bfloat16, facts)) == NEEDS_WEIGHT
