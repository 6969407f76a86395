# SPDX-License-Identifier: Apache-2.0
"""The oracle `truth64`: a process of its own, asked like any other, that can also give goldens."""

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from parity import golden, op_replay, oracle_process, record, truths
from parity.dtypes import Array, array
from parity.golden import GoldenError
from parity.op_cells import OpCell, expected
from parity.op_table import EXACT, OPS
from parity.oracle_process import Question, ask

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "oracles").glob("truth64*.py"))


def arguments(op="rms_norm", dtype="bf16"):
    return OPS[op].cases[0].arguments(dtype)


def test_it_needs_numpy_and_the_file_format_alone():
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module.split(".")[0])
    assert found - set(sys.stdlib_module_names) == {"numpy", "safetensors", "oracles"}


def test_it_says_that_it_can_run():
    command = [sys.executable, "-m", "oracles.truth64", "--available"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "truth64 1\n")


def test_the_formulas_are_in_the_oracle_and_in_parity_is_none():
    for path in (ROOT / "parity").glob("*.py"):
        assert "truth64_" not in path.read_text().replace('glob("truth64_*.py")', "").replace(
            "truth64_{path.name}", ""
        ), path.name
    for op in OPS:
        for symbol in truths.symbols_of(op):
            path, _, name = symbol.partition(":")
            assert name == op and (ROOT / path) in FILES


def test_floats_are_widened_exactly_and_integers_stay():
    bits = np.arange(0, 65536, 7, dtype=np.uint16)
    bits = bits[np.isfinite(Array("bf16", bits).values())]
    rows = Array("bf16", bits.reshape(-1, 1))
    picked = Array("i32", np.array([0, 5, len(bits) - 1], np.int32))
    (answer,) = ask("truth64", [Question("q", "embedding", {"input_ids": picked, "weight": rows})])
    assert answer.outputs["out"].dtype == "f64" and answer.told["lane"] == "float64"
    assert answer.told["callable"] == "oracles.truth64_ops.embedding"
    np.testing.assert_array_equal(answer.outputs["out"].data, rows.values()[picked.data])
    token = arguments("seeded_token", "f32")
    (answer,) = ask("truth64", [Question("q", "seeded_token", token)])
    assert answer.outputs["token"].dtype == "i64"


def test_what_it_cannot_answer_is_told_for_that_case_alone():
    questions = [
        Question("bad", "linear", {"x": arguments()["x"]}),
        Question("none", "no_such_op", {}),
        Question("good", "rms_norm", arguments()),
    ]
    bad, none, good = ask("truth64", questions)
    assert "TypeError" in bad.told["error"] and "has no op no_such_op" in none.told["error"]
    assert "error" not in good.told and good.told["repeat"] is True


def test_a_truth_that_can_not_be_had_makes_its_cell_invalid(monkeypatch):
    monkeypatch.setattr(truths, "_known", {})
    with pytest.raises(GoldenError, match="truth64: TypeError"):
        truths.truth_of("linear", {"x": arguments()["x"]})

    def absent(oracle, questions):
        raise GoldenError("truth64 ended with 1")

    monkeypatch.setattr(truths, "ask", absent)
    cell = OpCell("rms_norm", "plain", "f32", "torch", "cpu")
    row = op_replay.Lane().row(cell)
    assert row["verdict"] == "invalid" and row["reason"] == "truth64 ended with 1"


def test_a_truth_that_does_not_repeat_itself_is_none(monkeypatch):
    monkeypatch.setattr(truths, "_known", {})

    def unsteady(oracle, questions):
        return [
            dataclasses.replace(a, told={**a.told, "repeat": False}) for a in ask(oracle, questions)
        ]

    monkeypatch.setattr(truths, "ask", unsteady)
    with pytest.raises(GoldenError, match="gave other bits"):
        truths.truth_of("rms_norm", arguments())


def test_a_replay_asks_once_for_all_of_its_cells(monkeypatch):
    monkeypatch.setattr(truths, "_known", {})
    asked = []

    def counted(oracle, questions):
        asked.append(len(list(questions)))
        return ask(oracle, questions)

    monkeypatch.setattr(truths, "ask", counted)
    cells = expected("cpu", "op.rms_norm/,sample.min_p/")
    lane = op_replay.Lane()
    lane.prepare(cells)
    assert asked == [len({c.golden for c in cells if c.op == "rms_norm"})]
    assert {lane.row(cell)["verdict"] for cell in cells if not cell.refused} == {"pass"}
    assert len(asked) == 1
    monkeypatch.setattr(truths, "BATCH_BYTES", 1)
    monkeypatch.setattr(truths, "_known", {})
    lane.prepare(cells)
    assert asked[1:] == [1] * asked[0], "no process is given more than it may"


# --------------------------------------------------------------------------- as goldens' oracle


@pytest.fixture
def alone(monkeypatch):
    """Ops that no callable of upstream computes, so that the truth itself gives their goldens."""
    names = ("linear_add", "linear", "silu_and_mul", "embedding")
    entries = {name: dataclasses.replace(OPS[name], oracle="truth64") for name in names}
    monkeypatch.setattr(record, "OPS", entries)
    return entries


def test_goldens_of_the_truth_are_rounded_once_and_the_same_bytes_twice(alone, tmp_path, capsys):
    select = "linear_add/,silu_and_mul/plain,embedding/"
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert record.record(select, folder=one) == record.record(select, folder=two) == 0
    files = sorted(p.relative_to(one) for p in one.rglob("*.*"))
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in files)
    found = golden.read(one / "linear_add" / "plain.bf16.safetensors")
    assert {name: value.dtype for name, value in found.outputs().items()} == {
        "out": "bf16",
        "squares": "f32",
    }
    given = OPS["linear_add"].table.cases["linear_add", "plain"].arguments("bf16")
    want = array(truths.truth_of("linear_add", given)["out"], "bf16")
    assert found.outputs()["out"].sha256 == want.sha256
    assert found.facts["oracle"]["name"] == "truth64"
    assert found.facts["oracle"]["callable"] == "oracles.truth64_ops.linear_add"
    assert record.record(select, folder=one, check=True) == 0


def test_ours_are_green_against_such_goldens(alone, tmp_path, monkeypatch):
    """Where ours round once too: an op that rounds between its steps needs an oracle that does.
    What summing in float32 costs is in the floor."""
    assert record.record("linear/plain,embedding/", folder=tmp_path) == 0
    monkeypatch.setattr(op_replay, "closure_of", lambda cell: {"fine": "", "coarse": ""})
    lane = op_replay.Lane(folder=tmp_path)
    name = "linear/plain.f32.safetensors"
    assert lane.floors.of(name, golden.read(tmp_path / name).sha256, "out").rmse > 1e-8
    cells = expected("cpu", "linear/plain,embedding/", "torch")
    rows = [lane.row(cell) for cell in cells]
    assert len(rows) >= 6 and {(r["verdict"], r["oracle"]["name"]) for r in rows} == {
        ("pass", "truth64")
    }


def test_a_truth_that_contradicts_the_golden_makes_no_golden_and_no_green(monkeypatch):
    """A wrong truth would bless a wrong op: it has to agree with the oracle."""
    entries = {"rms_norm": dataclasses.replace(OPS["rms_norm"], oracle="fake")}
    monkeypatch.setattr(record, "OPS", entries)
    (good, *_) = record.ask_all("rms_norm/plain").answers
    assert good.fault() == ""
    right = truths.truth_of("rms_norm", good.arguments)["out"]
    cell = OpCell("rms_norm", "plain", "f32", "torch", "cpu")
    assert op_replay.Lane().row(cell)["verdict"] == "pass"
    for factor in (1.00001, 0.5, -1.0):
        wrong = {"out": right * factor}
        monkeypatch.setattr(record, "truth_of", lambda op, given, wrong=wrong: wrong)
        assert "the golden is off by" in good.fault(), factor
        monkeypatch.setattr(op_replay, "truth_of", lambda op, given, wrong=wrong: wrong)
        row = op_replay.Lane().row(cell)
        assert row["verdict"] == "error" and "truth disagree" in row["reason"], factor


def test_every_op_without_a_truth_is_exact():
    for entry in OPS.values():
        if not truths.symbols_of(entry.name):
            assert {entry.kind_of(name) for name in entry.outputs} == {EXACT}, entry.name


def test_it_runs_in_the_interpreter_of_vllmx():
    assert oracle_process.python_of("truth64") == sys.executable
