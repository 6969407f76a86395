# SPDX-License-Identifier: Apache-2.0
"""Recording: same bytes twice, and answers that prove nothing never become goldens."""

import ast
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from parity import (
    budget,
    calibrate,
    golden,
    model_golden,
    model_table,
    op_replay,
    oracle_process,
    policy,
    record,
    replay,
)
from parity.op_cells import OpCell
from parity.op_table import OPS
from vllmx.config import RunConfig

ROOT = Path(__file__).parents[2]
ORACLES = sorted((ROOT / "oracles").glob("*.py"))
ORACLE_PYTHON = os.environ.get("VLLMX_ORACLE_PYTHON")
PIECE = "rms_norm/plain,rms_norm/tinyvar,embedding/"


@pytest.fixture
def fake(monkeypatch):
    """Norms and embeddings are asked of the fake oracle."""
    entries = {
        name: dataclasses.replace(OPS[name], oracle="fake") for name in ("rms_norm", "embedding")
    }
    monkeypatch.setattr(record, "OPS", entries)
    return monkeypatch


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.*")}


def test_recorded_twice_the_goldens_are_the_same_bytes_and_replay_green(fake, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    assert record.record(PIECE, folder=one) == 0
    assert "12 goldens, 12 changed, 0 refused" in capsys.readouterr().out
    assert record.record(PIECE, folder=two) == 0
    assert contents(one) == contents(two) and len(contents(one)) == 14
    assert record.record(PIECE, folder=one, check=True) == 0
    fake.setattr(op_replay, "closure_of", lambda cell: {"fine": "", "coarse": ""})
    cell = OpCell("rms_norm", "plain", "bf16", "torch", "cpu")
    row = op_replay.Lane(folder=one).row(cell)
    assert row["verdict"] == "pass" and row["oracle"]["name"] == "fake"


def test_oracles_compute_with_what_every_cpu_has(fake, tmp_path):
    """Wider registers sum in another order: on another CPU the bytes would not be the same."""
    assert record.record("rms_norm/plain", folder=tmp_path) == 0
    facts = golden.read(tmp_path / "rms_norm" / "plain.f32.safetensors").facts
    assert facts["oracle"]["device"] == "cpu AVX2"


def test_only_a_kernel_that_needs_wider_registers_is_given_them(monkeypatch, capsys):
    """Without them its golden could not be recorded again, with them another's would differ."""
    environments = {}

    def run(command, env, **options):
        environments[len(environments)] = env
        return subprocess.CompletedProcess(command, 2, "", "not here")

    monkeypatch.setattr(oracle_process.subprocess, "run", run)
    monkeypatch.setattr(oracle_process, "python_of", lambda oracle: sys.executable)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX512")
    for name in oracle_process.REGISTERS:
        monkeypatch.delenv(name, raising=False)
    assert record.record("chunk_gated_delta_rule/fresh", check=True) == 3
    narrow, wide = (environments[number] for number in (0, 1))
    assert set(oracle_process.ANYWHERE) <= set(narrow)
    assert set(oracle_process.ANYWHERE) - set(wide) == set(oracle_process.REGISTERS)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: "AVX2")
    assert record.record("chunk_gated_delta_rule/fresh", check=True) == 3
    assert len(environments) == 3, "the narrow one alone"
    assert "vllm_gdn: upstream's kernel needs a CPU with AVX-512" in capsys.readouterr().out


def test_what_a_gpu_refuses_stays_known_when_other_cases_are_recorded(fake, tmp_path):
    """Lost, it would be asked for: each refused case would have no golden and be invalid."""
    elsewhere = {"rotary_embedding/long.f16.safetensors": "ValueError: of another run"}
    before = elsewhere | {"rms_norm/plain.f16.safetensors": "ValueError: taken since"}
    (tmp_path / golden.REFUSED).write_text(json.dumps(before))

    def ask(oracle, questions, wide, really=oracle_process.ask):
        answers = really(oracle, questions, wide)
        told = [
            {"error": "RuntimeError: only 16 bits"} if answer.id.endswith("f32.safetensors") else {}
            for answer in answers
        ]
        return [dataclasses.replace(a, told=a.told | more) for a, more in zip(answers, told)]

    fake.setattr(record, "ask", ask)
    assert record.record("rms_norm/plain", folder=tmp_path, ops=record.OPS) == 0
    assert golden.declined(tmp_path) == {
        **elsewhere,
        "rms_norm/plain.f32.safetensors": "RuntimeError: only 16 bits",
    }
    assert "rms_norm/plain.f16.safetensors" in golden.read_index(tmp_path)


def test_check_writes_nothing_and_tells_what_would_change(fake, tmp_path, capsys):
    assert record.record("rms_norm/plain", folder=tmp_path, check=True) == 1
    assert list(tmp_path.iterdir()) == []
    assert "new" in capsys.readouterr().out


def test_check_sees_a_floor_that_was_widened(fake, tmp_path, capsys):
    record.record("rms_norm/plain", folder=tmp_path)
    path = tmp_path / calibrate.FLOORS
    path.write_text(path.read_text().replace('"lanes":{}', '"lanes":{"x":{"out":{"rmse":0.5}}}', 1))
    assert record.record("rms_norm/plain", folder=tmp_path, check=True) == 1
    assert "another floor" in capsys.readouterr().out


def _bent(recorded: record.Recorded, **told: object) -> record.Recorded:
    answer = dataclasses.replace(recorded.answer, told={**recorded.answer.told, **told})
    return dataclasses.replace(recorded, answer=answer)


def test_answers_that_prove_nothing_are_refused(fake):
    recorded = record.ask_all("rms_norm/plain").answers[0]
    assert recorded.fault() == ""
    assert "gave other bits" in _bent(recorded, repeat=False).fault()
    assert "the oracle fails: no such kernel" in _bent(recorded, error="no such kernel").fault()
    value = recorded.answer.outputs["out"]

    def answering(outputs: dict) -> str:
        answer = dataclasses.replace(recorded.answer, outputs=outputs)
        return dataclasses.replace(recorded, answer=answer).fault()

    wrong = dataclasses.replace(value, data=value.data * value.data.dtype.type(1.01))
    assert "the golden is off by" in answering({"out": wrong})
    assert "outputs" in answering({"other": value})
    assert "outputs" in answering({})
    assert "empty" in answering({"out": dataclasses.replace(value, data=value.data[:0])})


def test_an_oracle_that_cannot_be_asked_blocks_and_writes_nothing(fake, tmp_path, capsys):
    fake.setattr(oracle_process, "python_of", lambda oracle: str(tmp_path / "no-python"))
    assert record.record(PIECE, folder=tmp_path) == 3
    assert "nox -s oracle" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_oracle_that_does_not_end_or_is_absent_says_so_in_words(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 20\n")
    python.chmod(0o755)
    monkeypatch.setattr(oracle_process, "python_of", lambda oracle: str(python))
    with pytest.raises(golden.GoldenError, match="fake gave no answer in 1 s"):
        oracle_process.call("fake", seconds=0.6)
    python.write_text("#!/bin/sh\necho a; echo no vllm here >&2; exit 2\n")
    with pytest.raises(oracle_process.OracleBlocked, match=r"^fake: no vllm here$"):
        oracle_process.call("fake")


def test_nothing_selected_is_not_success(fake, tmp_path):
    assert record.record("no_such_op", folder=tmp_path) == 2


def test_unsteady_and_failing_ops_are_told_by_the_oracle():
    questions = [
        oracle_process.Question(op, op, {"x": golden_input()})
        for op in ("unsteady", "absent", "no")
    ]
    unsteady, absent, unknown = oracle_process.ask("fake", questions)
    assert unsteady.told["repeat"] is False
    assert "can't be asked" in absent.told["error"] and absent.outputs == {}
    assert "has no op no" in unknown.told["error"]


def golden_input():
    return OPS["rms_norm"].cases[0].arguments("f32")["x"]


def test_floors_are_of_one_golden_and_follow_it(fake, tmp_path):
    assert record.record("rms_norm/plain", folder=tmp_path) == 0
    name = "rms_norm/plain.f32.safetensors"
    sha = golden.read(tmp_path / name).sha256
    floors = calibrate.Floors(tmp_path)
    assert floors.of(name, sha, "out") is not None
    assert floors.of(name, "0" * 64, "out") is None
    assert floors.of("rms_norm/other.f32.safetensors", sha, "out") is None
    (tmp_path / name).unlink()
    calibrate.write({}, tmp_path)
    assert name not in calibrate.Floors(tmp_path).entries


def test_floors_are_checked_without_a_byte_being_written(fake, tmp_path, capsys):
    assert record.record("rms_norm/plain", folder=tmp_path) == 0
    fake.setattr(calibrate, "FOLDER", tmp_path)
    config = RunConfig()
    config.parity.select, config.parity.check = "rms_norm/plain", True
    assert calibrate.run(config) == 0 and "floors measured, 0 changed" in capsys.readouterr().out
    path = tmp_path / calibrate.FLOORS
    for wide in (
        path.read_text().replace('"lanes":{}', '"lanes":{"x":{"out":{"rmse":0.5}}}', 1),
        path.read_text().replace('"floors":{', '"floors":{"gone/x":{"lanes":{}},', 1),
    ):
        path.write_text(wide)
        before = contents(tmp_path)
        assert calibrate.run(config) == 1
        assert "floors measured, 1 changed" in capsys.readouterr().out
        assert contents(tmp_path) == before
        config.parity.check = False
        assert calibrate.run(config) == 0 and contents(tmp_path) != before
        config.parity.check = True
        assert calibrate.run(config) == 0


def test_models_are_checked_until_time_is_over_each_night_others(monkeypatch, tmp_path, capsys):
    """As many nights as there are groups come by every model."""
    names = [entry.name for entry in model_table.chosen("tiny-")]
    asked = []

    def ask(entries):
        asked.append([entry.name for entry in entries])
        return [(entry, {entry.lanes[0]: b"golden"}) for entry in entries]

    monkeypatch.setattr(model_golden, "record", ask)
    clock = SimpleNamespace(monotonic=lambda: 10.0 * len(asked))
    monkeypatch.setattr(replay, "time", clock)
    seen = []
    groups = -(-len(names) // record.TOGETHER)
    for day in range(groups):
        asked.clear()
        assert record.record_models("tiny-", True, tmp_path, deadline=15.0, day=day) == 1
        assert [len(part) <= record.TOGETHER for part in asked] == [True, True]
        left = len(names) - sum(map(len, asked))
        assert f"{left} models are missing: time ran out" in capsys.readouterr().out
        seen += asked[0]
    assert seen == names and [*tmp_path.iterdir()] == []
    for entry in model_table.chosen("tiny-"):
        (tmp_path / entry.golden(entry.lanes[0])).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / entry.golden(entry.lanes[0])).write_bytes(b"golden")
    asked.clear()
    assert record.record_models("tiny-", True, tmp_path) == 0 and len(asked) == groups
    asked.clear()
    assert record.record_models("tiny-", True, tmp_path, deadline=15.0) == 2


# -------------------------------------------------------------------------------- the oracles


def _imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


def test_oracles_and_vllmx_know_nothing_of_each_other():
    for path in ORACLES:
        assert not _imports(path) & {"vllmx", "parity"}, path.name
    for path in (ROOT / "vllmx").rglob("*.py"):
        assert not _imports(path) & {"oracles", "vllm"}, path
    for path in (ROOT / "parity").glob("*.py"):
        if path.name.startswith("cpu_speed"):
            continue  # measures transformers' speed, and judges nothing
        assert not _imports(path) & {"vllm", "transformers", "gguf"}, path


def test_every_oracle_has_available_and_is_run_in_the_environment_that_it_needs():
    named = {p.stem for p in ORACLES if '"""Oracle' in p.read_text()[:80]}
    assert {"fake", "truth64", "hf_model", "gguf_dequant", "vllm_ops", "vllm_gpu_model"} <= named
    for name in named:
        tree = ast.parse((ROOT / "oracles" / f"{name}.py").read_text())
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert "available" in names | attributes, name
        upstream = name.startswith("vllm_") or name == "gguf_dequant"
        assert (name in oracle_process.OWN_ENVIRONMENT) == upstream, name


def test_an_oracle_says_whether_it_can_run_here():
    for name in ("fake", "gguf_dequant", "vllm_scheduler"):
        command = [sys.executable, "-m", f"oracles.{name}", "--available"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode in (0, 2), done.stderr
        assert (done.stdout if done.returncode == 0 else done.stderr).strip(), name


if ORACLE_PYTHON:

    def test_asked_again_the_oracles_give_the_goldens_that_are_here():
        assert (
            record.record("rms_norm/,paged_attention/decode,dequantize_gguf/q6_k", check=True) == 0
        )


# ------------------------------------------------------------------------- limits and budget


def test_every_class_of_the_op_table_has_limits():
    found = policy.load()
    for entry in OPS.values():
        if entry.kind != "exact":
            found.limits(entry.kind, entry.name, "torch", "f32", "cpu")
    with pytest.raises(policy.PolicyError, match="no limits for class"):
        found.limits("unknown", "op", "torch", "f32", "cpu")


def test_an_override_needs_a_reason_and_changes_the_hash(tmp_path):
    text = policy.POLICY.read_text()
    first, _, rest = text.partition("overrides:\n")
    text = first + "overrides: []\n" + rest[rest.index("# Whole models") :]
    path = tmp_path / "policy.yaml"
    limits = "limits: {rmse: 3, row: 4, ulp: 4, gain: 8}"
    where = "op: linear, provider: '*', dtype: f32, device: cuda"
    entry = f"overrides:\n- {{{where}, {limits}"
    path.write_text(text.replace("overrides: []", entry + "}"))
    with pytest.raises(policy.PolicyError, match="reason, evidence"):
        policy.load(path)
    path.write_text(text.replace("overrides: []", entry + ", reason: r, evidence: e}"))
    found = policy.load(path)
    assert found.limits("gemm", "linear", "fbgemm", "f32", "cuda").rmse == 3
    assert found.limits("gemm", "linear", "fbgemm", "bf16", "cuda").rmse == 2
    assert found.limits("gemm", "linear", "fbgemm", "f32", "cpu").rmse == 2
    assert found.sha256 != policy.load().sha256


def test_goldens_keep_to_their_budget():
    found = budget.usage()
    assert budget.faults(found) == []
    assert {part.name for part in found} >= {"models", "ops", "ops_gpu", "schedule", "text"}


def test_a_budget_that_is_overdrawn_is_told(tmp_path):
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "big.safetensors").write_bytes(b"0" * (budget.MAX_BYTES + 1))
    (tmp_path / "stuff").mkdir()
    (tmp_path / "loose.bin").write_bytes(b"0")
    told = budget.faults(budget.usage(tmp_path))
    assert any("beside: no folder of this name" in line for line in told)
    assert any("a file of 65537 bytes" in line for line in told)
    assert any("stuff: no folder of this name" in line for line in told)
    small = [budget.Usage("ops", 1, budget.TOTAL + 1, 1)]
    assert len(budget.faults(small)) == 2
