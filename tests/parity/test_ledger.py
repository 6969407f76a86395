# SPDX-License-Identifier: Apache-2.0
"""A checkout in small goes bad in every way that is known, and each way is named and not green."""

import datetime as dt
import json

import pytest
from toy_checkout import CASES, FACTS, build, forget, golden_bytes, show, write

from parity import comparison, evidence, explain, golden, ledger, plan, report
from parity.checkout import ROOT, Checkout
from parity.collect import canary_row
from parity.features import CANARY
from vllmx.config import RunConfig
from vllmx.exceptions import UserError


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A checkout with everything green, and its ledger and report written."""
    build(tmp_path, monkeypatch)
    assert call(ledger) == call(report) == 0
    return tmp_path


def call(module, **options):
    """The exit code of a verb."""
    config = RunConfig()
    for name, value in options.items():
        setattr(config.parity, name, value)
    return module.run(config)


def statuses(root):
    """Id -> (status, reason)."""
    here = Checkout(root)
    return {row.feature.id: (row.status, row.reason) for row in here.statuses(here.as_of())}


def op_golden(root, case=CASES[0]):
    return root / "parity" / "goldens" / "ops" / "toy" / f"{case}.f32.safetensors"


def test_a_healthy_checkout_is_green_but_for_what_is_not_built_and_the_canary(root, capsys):
    found = {name: status for name, (status, _) in statuses(root).items()}
    assert found == {
        "op.toy": "GREEN",
        "engine.toy": "GREEN",
        "model.later": "MISSING",
        "suite.canary": "RED",
    }
    assert call(ledger, check=True) == call(report, check=True) == 0
    assert "3 = 2 GREEN + 1 MISSING" in capsys.readouterr().out


# ---- planted states: what is done, the row that it is about, its status, words, exit of explain


def _delete_golden(root):
    op_golden(root).unlink()
    golden.write_index(root / "parity" / "goldens" / "ops")


def _cut_golden(root):
    path = op_golden(root)
    path.write_bytes(path.read_bytes()[:-3])


def _other_golden(root):
    op_golden(root).write_bytes(golden_bytes(CASES[0], 7.0))


def _recorded_anew(root):
    _other_golden(root)
    golden.write_index(root / "parity" / "goldens" / "ops")


def _no_index(root):
    (root / "parity" / "goldens" / "ops" / "index.json").unlink()


def _no_floor(root):
    write(root, "parity/goldens/ops/floors.json", '{"schema":1,"floors":{}}')


def _no_cells(root):
    write(root, "parity/features.yaml", "op.toy: {ours: [vllmx/toy.py], ops: [gone]}\n")


def _sign(root):
    write(root, "vllmx/toy.py", "def double(x):\n    return x - x\n")


def _comment(root):
    write(root, "vllmx/toy.py", "def double(x):\n    # Twice.\n    return x + x\n")


def _wider(root):
    text = (root / "parity" / "policy.yaml").read_text()
    assert "norm: {rmse: 2" in text
    write(root, "parity/policy.yaml", text.replace("norm: {rmse: 2", "norm: {rmse: 9"))


def _other_test(root):
    write(root, "tests/test_toy.py", "def test_one():\n    assert True\n")


def _file_gone(root):
    (root / "vllmx" / "engine.py").unlink()


def _dirty(root):
    forget(root)
    show(root, run={"dirty": True})


def _fallback(root):
    forget(root)
    show(root, proof={"selected": "reference"})


def _degenerate(root):
    forget(root)
    show(root, teeth={"zeros": False})


def _failed(root):
    show(root, verdict="fail", reason="rmse 3, 2 allowed")


def _skipped(root):
    forget(root)
    show(root, verdict="skip", reason="no compiler")


def _old(root):
    forget(root)
    show(root, ts="2020-01-01T00:00:00Z")


PLANTED = [
    (_delete_golden, "op.toy", "UNPROVEN", "no golden ops/toy/plain", 2),
    (_cut_golden, "op.toy", "RED", "damaged", 1),
    (_other_golden, "op.toy", "RED", "not the file that the index knows", 1),
    (_recorded_anew, "op.toy", "STALE", "the golden has changed", 2),
    (_no_index, "op.toy", "UNPROVEN", "no golden", 2),
    (_no_floor, "op.toy", "UNPROVEN", "noise of the oracle", 2),
    (_no_cells, "op.toy", "UNPROVEN", "no golden ops/gone", 2),
    (_sign, "op.toy", "STALE", "the code has changed", 2),
    (_comment, "op.toy", "GREEN", "shown", 0),
    (_wider, "op.toy", "STALE", "the limits have changed", 2),
    (_other_test, "engine.toy", "STALE", "the code has changed", 2),
    (_file_gone, "engine.toy", "MISSING", "not there: vllmx/engine.py", 2),
    (_dirty, "op.toy", "UNPROVEN", "uncommitted changes", 2),
    (_fallback, "op.toy", "UNPROVEN", "reference ran", 2),
    (_degenerate, "engine.toy", "UNPROVEN", "degenerate", 2),
    (_failed, "op.toy", "RED", "rmse 3, 2 allowed", 1),
    (_skipped, "op.toy", "BLOCKED", "no compiler", 3),
    (forget, "op.toy", "UNPROVEN", "no run has looked at it", 2),
]


@pytest.mark.parametrize(("plant", "row", "status", "words", "code"), PLANTED)
def test_planted_state_is_named(root, plant, row, status, words, code, capsys):
    plant(root)
    found, reason = statuses(root)[row]
    assert found == status, reason
    assert words in reason
    assert call(explain, select=row) == code
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("plant", [p[0] for p in PLANTED if p[0] not in (_comment,)])
def test_planted_state_makes_what_is_written_stale_or_invalid(root, plant):
    plant(root)
    assert call(ledger, check=True) in (1, 2)
    assert call(report, check=True) in (1, 2)


def test_evidence_gets_too_old(root, capsys):
    _old(root)
    assert call(explain, select="op.toy") == 2
    assert "last shown" in capsys.readouterr().out
    for day, expected in ((14, "GREEN"), (16, "STALE")):
        now = dt.datetime(2020, 1, day, tzinfo=dt.UTC)
        assert Checkout(root).statuses(now)[0].status == expected


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (_cut_golden, "damaged"),
        (_other_golden, "not the file that the index knows"),
        (_no_index, "no index of goldens"),
        (
            lambda root: write(root, "parity/goldens/ops/toy/x.txt", "?"),
            "no case expects it",
        ),
        (lambda root: op_golden(root).with_name("y.f32.safetensors").write_bytes(b"?"), "no case"),
        (forget, "the canary is UNPROVEN"),
        (lambda root: write(root, "parity/features.yaml", ""), "there is no canary row"),
    ],
)
def test_a_ledger_that_can_not_be_believed_says_so_and_exits_2(root, plant, words, capsys):
    plant(root)
    assert call(ledger) == call(ledger, check=True) == call(report) == 2
    assert words in capsys.readouterr().err
    assert "INVALID" in (root / "reports" / "parity.md").read_text()
    assert "INVALID" in (root / "reports" / "parity.html").read_text()


@pytest.mark.parametrize("dirty", [False, True])
def test_a_canary_that_is_found_no_more_makes_everything_invalid(root, dirty, capsys):
    rows = evidence.load(root / "parity" / "evidence")
    (old,) = [row for row in rows if row["feature"] == "suite.canary"]
    plain = {k: v for k, v in old.items() if k not in ("id", "reason")}
    for fields, code in (
        ({"verdict": "pass", "ts": "2099-01-01T00:00:00Z"}, 2),
        ({"verdict": "skip", "reason": "no golden", "ts": "2099-01-01T00:00:01Z"}, 2),
        ({"verdict": "fail", "reason": "found", "ts": "2099-01-01T00:00:02Z"}, 0),
    ):
        run = {**plain["run"], "dirty": dirty}
        row = evidence.make_row(**{**plain, "run": run, **fields})
        evidence.append([row], root / "parity" / "evidence")
        assert call(ledger, check=True) == call(report, check=True) != 0
        assert call(ledger) == call(report) == code
        assert ("the canary is" in capsys.readouterr().err) == (code == 2)


def _edit_limits(root):
    path = root / "parity" / "policy.yaml"
    path.write_text(path.read_text().replace("pointwise: {rmse: 2", "pointwise: {rmse: 3"))


@pytest.mark.parametrize(
    ("plant", "part"),
    [
        (lambda root: write(root, "parity/compare.py", "def row():\n    return 1\n"), "compare.py"),
        (lambda root: write(root, "parity/op_replay.py", "LANE = 1\n"), "op_replay.py"),
        (lambda root: write(root, "parity/floor_cap.py", "CAP = 1\n"), "floor_cap.py"),
        (lambda root: write(root, "parity/truths.py", "contradiction = 1\n"), "truths.py:contra"),
        (lambda root: write(root, "parity/calibrate.py", "class Floors: ...\n"), "calibrate.py:F"),
        (_edit_limits, "policy.yaml"),
    ],
)
def test_a_canary_that_was_found_by_another_comparison_makes_everything_invalid(
    root, plant, part, capsys
):
    """What it shows is that faults are found, and by that comparison alone."""
    words = "the canary was last looked at with another comparison (parity/" + part
    plant(root)
    assert call(ledger) == call(ledger, check=True) == call(report) == 2
    assert words in capsys.readouterr().err
    here = Checkout(root)
    (cell,) = here.by_id[CANARY].cells
    again = canary_row(here, cell, dict(FACTS))
    append_later(root, {k: v for k, v in again.items() if k != "id"})
    assert call(ledger) == call(report) == 0
    assert "INVALID" not in capsys.readouterr().err


def test_a_comment_in_the_comparison_calls_for_no_other_look(root):
    write(root, "parity/compare.py", "LIMIT = 1\n")
    before = comparison.sums(root)
    write(root, "parity/compare.py", '"""Words."""\n\nLIMIT = 1  # more\n')
    assert comparison.changed(before, root) == []
    write(root, "parity/compare.py", "LIMIT = 2\n")
    assert comparison.changed(before, root) == ["parity/compare.py"]


def test_every_part_of_the_comparison_is_there():
    assert all(comparison.sums(ROOT).values())


def append_later(root, fields):
    """Append a row that is newer than all."""
    row = evidence.make_row(**{**fields, "ts": "2099-01-01T00:00:00Z"})
    evidence.append([row], root / "parity" / "evidence")


def test_a_canary_whose_row_says_nothing_of_its_comparison_is_looked_at_again(root, capsys):
    rows = evidence.load(root / "parity" / "evidence")
    (old,) = [row for row in rows if row["feature"] == CANARY]
    plain = {k: v for k, v in old.items() if k not in ("id", "details")}
    append_later(root, plain)
    assert call(ledger) == 2
    assert "another comparison (parity/calibrate.py:Floors, " in capsys.readouterr().err


def test_changed_evidence_is_refused(root):
    (path,) = (root / "parity" / "evidence").glob("*.jsonl")
    path.write_text(path.read_text().replace('"pass"', '"fail"', 1))
    with pytest.raises(evidence.EvidenceError, match=r"reason|changed"):
        call(ledger)


def test_nothing_selected_is_an_error(root):
    for module in (ledger, plan):
        with pytest.raises(UserError, match="no feature"):
            call(module, select="nothing")
    with pytest.raises(UserError, match=r"no row 'op.toi'.*Did you mean op.toy"):
        call(explain, select="op.toi")
    with pytest.raises(UserError, match="needs the id"):
        call(explain)


@pytest.mark.parametrize("name", ["ledger.md", "ledger.jsonl", "parity.md", "parity.html"])
def test_an_edited_or_missing_file_is_stale(root, name, capsys):
    module = ledger if "ledger" in name else report
    path = root / "reports" / name
    text = path.read_text()
    path.write_text(text.replace("GREEN", "green", 1))
    assert call(module, check=True) == 1
    assert f"{name}: line" in capsys.readouterr().out
    path.write_text(text + "\n")
    assert call(module, check=True) == 1
    path.unlink()
    assert call(module, check=True) == 1
    assert "missing" in capsys.readouterr().out
    assert call(module) == call(module, check=True) == 0


def test_rows_are_json_objects_with_id_tier_status_reason_and_evidence(root, capsys):
    capsys.readouterr()
    assert call(ledger, json=True) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["id"] for row in rows] == ["op.toy", "engine.toy", "model.later", "suite.canary"]
    known = {row["id"][:16] for row in evidence.load(root / "parity" / "evidence")}
    for row in rows:
        assert {"id", "tier", "status", "reason", "evidence", "ours", "upstream"} <= row.keys()
        assert set(row["evidence"]) <= known
    assert [len(row["evidence"]) for row in rows] == [2, 1, 0, 1]
    assert call(ledger, json=True, tier="T1") == 0
    assert [json.loads(x)["id"] for x in capsys.readouterr().out.splitlines()] == ["engine.toy"]


def test_a_row_names_the_oracles_of_its_goldens(root, capsys):
    show(root, oracle={"name": "vllm_ops", "version": "1", "lane": "cpu-attention"})
    capsys.readouterr()
    call(ledger, json=True, select="op.toy")
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["oracles"] == ["vllm_ops: cpu-attention"]
    call(explain, select="op.toy")
    assert "recorded by: vllm_ops: cpu-attention" in capsys.readouterr().out


def test_plan_is_empty_when_all_is_shown_and_names_each_command_once(root, capsys):
    capsys.readouterr()
    assert call(plan) == 0
    assert "0 cells" in capsys.readouterr().out
    _sign(root)
    assert call(plan) == 1
    out = capsys.readouterr().out
    assert out.count("vllmx parity replay op.toy/") == 1 and "2 STALE" in out
    told = ["vllmx parity collect a", "x", "vllmx parity collect b", "vllmx parity replay c"]
    assert plan.join(told) == ["x", "vllmx parity replay c", "vllmx parity collect --select a,b"]


def test_totals_add_up(root):
    data = json.loads((root / "reports" / "report.json").read_text())
    rows = [row for row in data["rows"] if not row["canary"]]
    assert sum(data["statuses"].values()) == len(rows) == 3
    assert data["statuses"] == {
        name: sum(data["tiers"][tier][name] for tier in data["tiers"]) for name in data["statuses"]
    }
    assert sum(n for area in data["areas"].values() for n in area.values()) == len(rows)
    assert sum(data["cells"].values()) == sum(sum(row["cells"].values()) for row in rows)
    assert data["evidence"]["rows"] == sum(data["evidence"]["verdicts"].values())
    lines = (root / "reports" / "ledger.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        assert len(row["evidence"]) <= sum(row["cells"].values())


def test_a_rendering_is_the_same_twice_and_another_once_there_is_more_evidence(root):
    first, _ = report.render(Checkout(root))
    assert first == report.render(Checkout(root))[0]
    show(root, ts="2099-01-01T00:00:00Z")
    assert first != report.render(Checkout(root))[0]
