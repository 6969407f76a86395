# SPDX-License-Identifier: Apache-2.0
"""Texts in the verbs and the ledger, and how they and the scheduler's traces are recorded."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from parity import evidence, golden, record, record_specs, replay, text_replay
from parity.catalogue import Listed
from parity.cells import spell_out
from parity.closure import items
from parity.features import Declared
from parity.golden import GoldenError
from parity.op_table import OPS
from parity.oracle_process import OracleBlocked
from parity.selection import by_kind
from parity.status import Policy, status, when
from parity.text_cases import selected, specs
from parity.text_replay import golden_name, pack
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

ROOT = Path(__file__).parents[2]
HASHES = next(spec for spec in specs() if spec["name"] == "block_hash/sha256_cbor")
ORACLE_PYTHON = os.environ.get("VLLMX_ORACLE_PYTHON")


@pytest.fixture
def folder(tmp_path):
    """A copy of the goldens."""
    shutil.copytree(golden.TEXT, tmp_path / "text")
    return tmp_path / "text"


def facts_of(name: str) -> dict:
    return golden.read(golden.TEXT / f"{name}.json").facts


# ---------------------------------------------------------------------- the verbs and the ledger


def run(tmp_path, **options) -> int:
    config = RunConfig()
    config.parity.output_dir = str(tmp_path)
    for name, value in options.items():
        setattr(config.parity, name, value)
    return replay.run(config)


def test_texts_are_cells_beside_ops(tmp_path, capsys):
    assert run(tmp_path, select="op.embedding/plain,text.block_hash") == 0
    rows = evidence.load(tmp_path)
    assert {row["feature"] for row in rows} == {"op.embedding", "text.block_hash"}
    assert "2 ops, models and texts" in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing of what is selected has it"):
        run(tmp_path, select="text.block_hash", provider="torch")
    with pytest.raises(UserError, match=r"no golden's name begins with 'text\.no_such'"):
        run(tmp_path, select="text.no_such")


def test_words_of_select_go_to_their_kind():
    kinds = ("ops", "text")
    assert by_kind(None, kinds) == {"ops": None, "text": None}
    assert by_kind("linear, model.tiny,text.chat,op.x,schedule.burst", kinds) == {
        "ops": "linear,op.x",
        "models": "model.tiny",
        "text": "text.chat",
        "schedule": "schedule.burst",
    }
    assert [spec["name"] for spec in selected("text.block_hash/sha256_cbor")] == [HASHES["name"]]
    assert len(selected(None)) == len(specs()) == 8


def test_the_ledger_follows_the_goldens_and_the_runs(folder):
    declared = Declared(
        "kv.x", "T0", "", "", ("vllmx/core/block_hash.py",), (), {"text": ("block_hash",)}
    )
    rows = [
        evidence.make_row(**{**unsigned(row), "run": {**row["run"], "dirty": False}})
        for row in replay.replay_texts("text.block_hash")
    ]
    here = Listed(ROOT)
    feature = spell_out(declared, here, ROOT)
    assert len(feature.cells) == 2 and feature.cells[0].command.startswith(
        "vllmx parity replay text."
    )
    closures = {cell.key: here.closure(cell) for cell in feature.cells}

    def told(goldens, rows=rows, closures=closures):
        (found,) = status([feature], goldens, rows, closures, Policy(), when(rows[0]))
        return found.status, found.reason

    def goldens():
        listed = Listed(ROOT)
        listed.folder = folder.parent
        return listed.goldens()

    assert told(goldens())[0] == "GREEN"
    failed = evidence.make_row(**{**unsigned(rows[0]), "verdict": "fail", "reason": "1 of 26"})
    assert told(goldens(), [*rows, failed])[0] == "RED"
    other = {key: {**value, "fine": "0"} for key, value in closures.items()}
    assert told(goldens(), closures=other)[0] == "STALE"
    path = folder / golden_name(HASHES)
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert told(goldens())[0] == "RED"
    path.write_bytes(golden.pack_json({**golden.unpack_json(data).facts, "license": "other"}))
    golden.write_index(folder)
    assert told(goldens())[0] == "STALE"
    path.unlink()
    assert told(goldens())[0] == "UNPROVEN"


def unsigned(row: dict) -> dict:
    return {key: value for key, value in row.items() if key != "id"}


def test_code_that_decides_is_in_the_closure_of_its_cells():
    reached = items(["parity/text_answers.py:chat"])
    assert "vllmx/entrypoints/chat_utils.py:_cut_at_mark" in reached
    assert "vllmx/core/block_hash.py:hash_block_tokens" not in reached
    assert "vllmx/core/block_hash.py:hash_block_tokens" in items(
        ["parity/text_answers.py:block_hash"]
    )
    assert "vllmx/engine/token_pieces.py:PieceDecoder" in items(
        ["parity/text_answers.py:detokenizer"]
    )
    assert "vllmx/model_loader/spm_merges.py:_find" in items(["parity/text_answers.py:tokenizer"])
    kinds = {text_replay.closure_of(kind)["fine"] for kind in text_replay.KINDS}
    assert len(kinds) == 4


# ---------------------------------------------------------------------- recording


def told(change=lambda answers: None):
    """An oracle that answers as the goldens do, `change`d."""

    def call(oracle: str, job: Path, out: Path) -> None:
        assert oracle == "vllm_text"
        asked = json.loads(job.read_text())
        answers = {}
        for spec in asked["specs"]:
            facts = facts_of(spec["name"])
            answers[spec["name"]] = {
                "callable": facts["oracle"]["callable"],
                "source_sha256": facts["source_sha256"],
                "repeat": True,
                "cases": facts["answers"],
            }
        change(answers)
        oracle_facts = facts_of(HASHES["name"])["oracle"]
        out.write_text(json.dumps({"oracle": oracle_facts, "answers": answers}))

    return call


def _other_answer(answers):
    answers[HASHES["name"]]["cases"]["plain.4"]["none"] = "00"


def _unsteady(answers):
    answers[HASHES["name"]]["repeat"] = False


def _unanswered(answers):
    del answers[HASHES["name"]]["cases"]["plain.4"]


def test_recording_writes_what_changed_and_check_only_tells(tmp_path, monkeypatch, capsys):
    select = "text.block_hash,text.chat/gemma3"
    monkeypatch.setattr(record_specs, "call", told())
    assert record_specs.record_text(select, True, tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
    assert record_specs.record_text(select, False, tmp_path) == 0
    assert record_specs.record_text(select, True, tmp_path) == 0
    assert "3 goldens, 0 changed" in capsys.readouterr().out
    for name in golden.files(tmp_path):
        assert (tmp_path / name).read_bytes() == (golden.TEXT / name).read_bytes()
    assert golden.read_index(tmp_path).keys() == set(golden.files(tmp_path))
    monkeypatch.setattr(record_specs, "call", told(_other_answer))
    assert record_specs.record_text(select, True, tmp_path) == 1
    assert "block_hash/sha256_cbor.json: differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "words"), [(_unsteady, "second pass"), (_unanswered, "not answered as asked")]
)
def test_answers_that_prove_nothing_are_refused(change, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(record_specs, "call", told(change))
    assert record_specs.record_text("text.block_hash", False, tmp_path) == 2
    assert words in capsys.readouterr().out and list(tmp_path.iterdir()) == []


def test_each_kind_is_recorded_by_its_own_oracle_and_the_gravest_code_counts(monkeypatch):
    asked = []
    for name, code in (("record", 0), ("record_models", 1), ("record_text", 3)):
        monkeypatch.setattr(
            record, name, lambda *a, name=name, code=code, **k: asked.append((name, a[0])) or code
        )
    monkeypatch.setattr(record, "record_schedule", lambda *a: asked.append(("schedule", a)) or 0)
    config = RunConfig()
    config.parity.select = "op.x,model.tiny,text.chat"
    assert record.run(config) == 3
    assert asked == [
        ("record", "op.x"),
        ("record_models", "model.tiny"),
        ("record_text", "text.chat"),
    ]
    config.parity.select, config.parity.check = None, True
    asked.clear()
    assert record.run(config) == 3
    assert asked == [("record", None), ("schedule", (None, True)), ("record_text", None)]
    config.parity.minutes = 1e-9
    asked.clear()
    assert record.run(config) == 2 and asked == []


def test_an_oracle_that_is_not_here_blocks(monkeypatch, capsys):
    def call(oracle, *arguments):
        raise OracleBlocked(f"{oracle}: there is no python")

    monkeypatch.setattr(record_specs, "call", call)
    assert record_specs.record_text("text.block_hash", True) == 3
    assert record_specs.record_schedule("schedule.burst-1", True) == 3
    assert record_specs.record_schedule("schedule.no_such", True) == 2
    assert record_specs.record_text("text.no_such", True) == 2
    assert "vllm_scheduler: there is no python" in capsys.readouterr().out


def test_nox_asks_for_every_op():
    prefixes = ("op.", "sample.")
    assert f'"ops": "{",".join(prefixes)}"' in (ROOT / "noxfile.py").read_text()
    assert all(entry.feature.startswith(prefixes) for entry in OPS.values())
    assert set(by_kind(",".join(prefixes), ())) == {"ops"}


def test_traces_are_recorded_as_they_are(monkeypatch, tmp_path):
    def call(oracle, job, out):
        out.mkdir()
        for spec in json.loads(job.read_text()):
            name = f"{spec['name']}{record_specs.SUFFIX}"
            shutil.copy(record_specs.SCHEDULE / name, out)

    monkeypatch.setattr(record_specs, "call", call)
    assert record_specs.record_schedule("schedule.burst-1,schedule.salt", True) == 0
    assert record_specs.record_schedule("schedule.burst-1", False, tmp_path) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["burst-1.json.zz"]


def test_the_oracle_shares_no_code_with_vllmx_and_says_whether_it_can_run():
    tree = ast.parse((ROOT / "oracles" / "vllm_text.py").read_text())
    names = {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert not {name.split(".")[0] for name in names} & {"vllmx", "parity"}
    command = [sys.executable, "-m", "oracles.vllm_text", "--available"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 2)
    assert (done.stdout if done.returncode == 0 else done.stderr).strip()


def test_a_golden_must_be_a_whole_answer():
    facts = facts_of(HASHES["name"])
    answer = {"callable": "c", "source_sha256": "", "repeat": True, "cases": facts["answers"]}
    assert (
        golden.unpack_json(pack(HASHES, answer, facts["oracle"])).facts["source_sha256"] == "none"
    )
    with pytest.raises(GoldenError, match=r"must say its oracle\.torch"):
        pack(HASHES, answer, {**facts["oracle"], "torch": ""})


if ORACLE_PYTHON:

    def test_recorded_again_the_goldens_are_the_same_bytes():
        assert record_specs.record_text(None, check=True) == 0
