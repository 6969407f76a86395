# SPDX-License-Identifier: Apache-2.0
"""The report of the chunked gated delta rule: its figures, and that a worse kernel is told of."""

import json
from pathlib import Path

import numpy as np
import pytest

from parity import gdn_chunked
from parity.op_cells import expected

CASES = ("mixed", "shared")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    cells = expected("cpu", "chunk_gated_delta_rule/", "torch")
    return gdn_chunked.measure([cell for cell in cells if cell.case in CASES])


def test_every_case_dtype_and_output_has_a_row_and_ours_is_as_near_as_upstream(rows) -> None:
    found = {(row["case"], row["dtype"], row["of"]) for row in rows}
    assert found == {
        (c, d, o) for c in CASES for d in ("bf16", "f16", "f32") for o in ("out", "state")
    }
    assert gdn_chunked.farther(rows) == []
    # Rounding once to a dtype is what ours does, no more.
    most = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-20}
    assert all(0 < row["ours"]["rms"] < most[row["dtype"]] for row in rows)


def test_a_rule_that_is_off_is_told_of(rows) -> None:
    for row in rows:
        far = 5 * max(row["upstream"]["rms"], 1e-6)
        assert gdn_chunked.farther([{**row, "ours": {"rms": far, "worst": far}}])


def test_distances_are_over_the_size_of_the_truth() -> None:
    found = gdn_chunked.distance(np.array([3.0, -4.4]), np.array([3.0, -4.0]))
    scale = np.sqrt(12.5)
    assert found == pytest.approx({"rms": np.sqrt(0.08) / scale, "worst": 0.4 / scale})


def test_the_report_is_written_and_its_exit_code_is_the_verdict(
    rows, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(gdn_chunked, "measure", lambda: rows)
    out = tmp_path / "gdn"
    assert gdn_chunked.main(["--out", str(out)]) == 0
    assert json.loads(out.with_suffix(".json").read_text()) == rows
    text = out.with_suffix(".md").read_text()
    assert "| mixed | bf16 | state |" in text and text.strip() in capsys.readouterr().out
    far = [{**row, "ours": {"rms": 1.0, "worst": 1.0}} for row in rows]
    monkeypatch.setattr(gdn_chunked, "measure", lambda: far)
    assert gdn_chunked.main([]) == 1
    assert "farther than it may be: mixed/bf16 out" in capsys.readouterr().out
