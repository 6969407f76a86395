# SPDX-License-Identifier: Apache-2.0
"""The report of the chunked gated delta rule: its figures, and that a worse kernel is told of."""

import json
from pathlib import Path

import numpy as np
import pytest

from parity import gdn_chunked

CASES = ("mixed", "shared")


@pytest.fixture(scope="module")
def rows() -> list[dict]:
    return gdn_chunked.measure(list(CASES))


def test_every_case_dtype_and_output_has_a_row_and_ours_is_as_near_as_upstream(rows) -> None:
    found = {(row["case"], row["dtype"], row["of"]) for row in rows}
    assert found == {
        (c, d, o) for c in CASES for d in ("bf16", "f16", "f32") for o in ("out", "state")
    }
    assert gdn_chunked.farther(rows) == []
    # Rounding once to a dtype is what ours does, no more.
    most = {"bf16": 2.0**-8, "f16": 2.0**-11, "f32": 2.0**-20}
    assert all(0 < row["torch"]["rms"] < most[row["dtype"]] for row in rows)
    # Triton's kernel keeps what is between in float32, or in two halves of 16 bits.
    assert all(0 < row["triton"]["rms"] < most[row["dtype"]] for row in rows)
    assert any(row["triton"] != row["torch"] for row in rows)


@pytest.mark.parametrize("arm", gdn_chunked.ARMS)
def test_a_rule_that_is_off_is_told_of(rows, arm) -> None:
    for row in rows:
        far = 5 * max(row["upstream"]["rms"], 1e-6)
        (place,) = gdn_chunked.farther([{**row, arm: {"rms": far, "worst": far}}])
        assert place == f"{row['case']}/{row['dtype']} {row['of']} {arm}"


def test_a_call_that_an_arm_refuses_is_a_dash_and_no_fault(rows) -> None:
    without = [{key: value for key, value in row.items() if key != "triton"} for row in rows]
    assert gdn_chunked.farther(without) == []
    assert " | - | " in gdn_chunked.render(without)


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
    assert "2.29e-4 (out) and 2.25e-3 (state)" in text
    far = [{**row, "triton": {"rms": 1.0, "worst": 1.0}} for row in rows]
    monkeypatch.setattr(gdn_chunked, "measure", lambda: far)
    assert gdn_chunked.main([]) == 1
    assert "farther than it may be: mixed/bf16 out triton" in capsys.readouterr().out
