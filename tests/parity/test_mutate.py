# SPDX-License-Identifier: Apache-2.0
"""Planted faults: where they are, what counts as found, and that the tree stays as it was."""

import time
from collections import Counter
from pathlib import Path

import pytest

from parity import evidence, model_table, mutant_detectors, mutate, op_table
from parity.mutate import Copy, Mutant, catalogue, dead_anchors, judge
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

ROOT = Path(__file__).parents[2]


def test_every_anchor_is_in_its_file_exactly_once() -> None:
    assert dead_anchors(catalogue()) == []


def test_there_are_sixty_faults_in_all_classes_and_honest_alternates() -> None:
    found = catalogue()
    faults = [mutant for mutant in found if not mutant.honest]
    assert len(faults) >= 60
    classes = Counter(mutant.category for mutant in faults)
    assert set(classes) >= {
        *("norm", "activation", "rope", "gemm", "cache", "attention", "quant"),
        *("sampler", "kv", "scheduler", "loader", "model"),
    }
    assert sum(mutant.honest for mutant in found) >= 6
    providers = Counter(Path(mutant.file).name for mutant in faults)
    assert providers["triton_ops.py"] >= 4 and providers["native.c"] >= 8


def mutant(**facts: object) -> Mutant:
    entry = {"name": "x", "category": "norm", "file": "f.py", "find": "a", "replace": "b"}
    return Mutant(**{**entry, "by": "tests/x.py", "honest": False, **facts})


def test_a_fault_is_found_if_its_detector_turns_red() -> None:
    assert judge(mutant(), (0, ""), (1, "bad")) == ("pass", "")
    assert judge(mutant(), (0, ""), (0, ""))[0] == "fail"
    assert judge(mutant(), (1, "red before"), (1, ""))[0] == "invalid"


@pytest.mark.parametrize("code", [2, 3])
def test_a_replay_that_could_not_look_has_found_nothing(code: int) -> None:
    """A fault that takes the provider away leaves nothing to be compared."""
    detector = "replay op.rms_norm native"
    assert judge(mutant(by=detector), (0, ""), (code, "no compiler"))[0] == "invalid"
    assert judge(mutant(by=detector), (0, ""), (1, "rmse")) == ("pass", "")


def test_a_fault_that_leaves_no_python_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("x = a\n")
    assert dead_anchors([mutant()], tmp_path) == []
    (told,) = dead_anchors([mutant(replace="(")], tmp_path)
    assert told.startswith("x: f.py is no Python with it")


def test_an_honest_alternate_must_leave_it_green() -> None:
    assert judge(mutant(honest=True), (0, ""), (0, "")) == ("pass", "")
    assert judge(mutant(honest=True), (0, ""), (1, ""))[0] == "fail"


WEAKER = [
    # What is weakened, as it was and as it is then, and whether the detector looks at it.
    ("parity/policy.yaml", "red: 2", "red: 3", {"replay", "schedule", "test"}),
    ("parity/compare.py", "x <= 2", "x <= 9", {"replay"}),
    ("parity/helper.py", "K = 1", "K = 2", {"replay"}),
    ("parity/replay_schedule.py", "x = 1", "x = 2", {"schedule"}),
    ("tests/test_x.py", "assert y == 1", "assert y", {"test"}),
    ("tests/conftest.py", "y = 1", "y = 2", {"test"}),
    ("parity/goldens/ops/index.json", '"a/x": "1"', '"a/x": "2"', {"replay"}),
    ("parity/goldens/ops/floors.json", "0.1", "0.5", {"replay"}),
    ("parity/goldens/schedule/t", "told", "other", {"schedule"}),
    ("parity/compare.py", "# why", "# because", set()),
    ("parity/goldens/ops/index.json", '"b/x": "1"', '"b/x": "2"', set()),
    ("parity/replay.py", "# other", "# others", set()),
    ("vllmx/far.py", "z = 1", "z = 2", set()),
]


@pytest.mark.parametrize("change", WEAKER, ids=lambda change: f"{change[0]} {change[2]}")
def test_a_detector_that_is_weakened_has_found_nothing_yet(tmp_path: Path, change) -> None:
    files = {
        "f.py": "a",
        "parity/policy.yaml": "red: 2",
        "parity/replay.py": "from . import compare  # other\nimport vllmx.far\n",
        "parity/compare.py": "# why\nfrom .helper import K\nok = lambda x: x <= 2\n",
        "parity/helper.py": "K = 1\n",
        "parity/replay_schedule.py": "x = 1\n",
        "parity/goldens/ops/index.json": '{"goldens": {"a/x": "1", "b/x": "1"}}',
        "parity/goldens/ops/floors.json": '{"floors": {"a/x": {"rmse": 0.1}}}',
        "parity/goldens/schedule/t": "told",
        "tests/test_x.py": "from conftest import y\n\n\ndef test_x():\n    assert y == 1\n",
        "tests/conftest.py": "y = 1\n",
        "vllmx/far.py": "z = 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    detectors = {"replay": "replay op.a torch", "schedule": "schedule", "test": "tests/test_x.py"}
    faults = {kind: mutant(by=by) for kind, by in detectors.items()}
    before = {kind: mutate.closure_of(fault, tmp_path) for kind, fault in faults.items()}
    file, find, replace, looks = change
    assert find in files[file]
    (tmp_path / file).write_text(files[file].replace(find, replace))
    after = {kind: mutate.closure_of(fault, tmp_path) for kind, fault in faults.items()}
    assert {kind for kind in faults if after[kind] != before[kind]} == looks


def test_each_detector_s_judges_are_known() -> None:
    detectors = mutant_detectors.Detectors(ROOT)
    for kind, file in mutant_detectors.START.items():
        assert (ROOT / file).is_file(), kind
    replay = detectors.code.judges(mutant_detectors.START["replay"])
    judges = ("compare", "op_replay", "model_replay", "model_gate", "golden", "calibrate", "truths")
    assert {f"parity/{name}.py" for name in judges} <= set(replay)
    for fault in catalogue():
        words = fault.by.split()
        if words[0] == "replay":
            assert detectors._goldens_of(words[1]), f"{fault.name}: no golden of {words[1]}"
        elif words[0] != "schedule":
            assert (ROOT / fault.by.split("::")[0]).is_file(), fault.name


def test_what_a_replay_is_asked_to_look_at_is_there() -> None:
    """Else its row is invalid, and the fault neither found nor missed."""
    for fault in catalogue():
        if not fault.by.startswith("replay "):
            continue
        select, provider = (word.partition("=")[2] for word in fault.command()[4:6])
        if select.startswith("model."):
            assert [*model_table.expected(select, provider)], fault.name
        else:
            assert any(f"{e.feature}/".startswith(select) for e in op_table.OPS.values()), fault


def test_a_moved_or_doubled_anchor_is_dead(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("a a")
    assert dead_anchors([mutant()], tmp_path) == ["x: 2 times in f.py"]
    assert dead_anchors([mutant(file="gone.py")], tmp_path) == ["x: 0 times in gone.py"]


def test_an_entry_without_a_field_or_a_change_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mutants.yaml"
    path.write_text("mutants: {x: {class: norm, file: f, find: a, replace: a, by: t}}\nhonest: {}")
    with pytest.raises(UserError, match="x needs"):
        catalogue(path)


def test_the_fault_is_planted_in_a_copy_and_taken_out_again(tmp_path: Path) -> None:
    planted = next(m for m in catalogue() if m.name == "queue-last-come-first")
    copy = Copy(tmp_path)
    seen = {}

    def look(mutant: Mutant) -> tuple[int, str]:
        seen["text"] = (tmp_path / mutant.file).read_text()
        return 0, ""

    copy.run = look
    before = (ROOT / planted.file).read_text()
    copy.planted(planted)
    assert planted.replace in seen["text"] != before
    assert (tmp_path / planted.file).read_text() == before == (ROOT / planted.file).read_text()


def test_the_scheduler_s_detector_finds_a_planted_fault() -> None:
    chosen = [m for m in catalogue() if m.name == "queue-last-come-first"]
    (row,) = mutate.mutate(chosen, {m.name: mutate.closure_of(m) for m in chosen})
    assert row["verdict"] == "pass" and row["proof"]["exit_code"] != 0


CLOSURE = {"fine": "f", "coarse": "f"}


def shown(name: str, ts: str = "2026-01-01T00:00:00Z", **facts: object) -> evidence.Row:
    """A row that tells of the mutant `name`."""
    fields = {"feature": f"mutant.{name}", "case": "tests/x.py", "provider": "vllmx"}
    fields |= {"device": {"name": "cpu"}, "mode": "planted", "golden_sha": "", "closure": CLOSURE}
    fields |= {"oracle": {}, "verdict": "pass", "checks": {}, "proof": {}, "run": {}}
    return evidence.make_row(**(fields | {"ts": ts} | facts))


def test_what_was_never_shown_comes_first_then_what_is_stale_and_of_two_the_older() -> None:
    names = ("new", "old", "invalid", "stale", "never", "dirty", "by")
    rows = [
        shown("new", "2026-01-09T00:00:00Z"),
        shown("new"),
        shown("old", "2026-01-08T00:00:00Z"),
        shown("invalid", "2026-01-07T00:00:00Z", verdict="invalid", reason="red before"),
        shown("stale", "2026-01-05T00:00:00Z", closure={"fine": "g", "coarse": "g"}),
        shown("dirty", "2026-01-09T00:00:00Z", run={"dirty": True}),
        shown("by", "2026-01-06T00:00:00Z", case="tests/y.py"),
    ]
    known = dict.fromkeys(names, CLOSURE)
    ordered = mutate.stalest_first([mutant(name=name) for name in names], known, rows)
    wanted = ["never", "dirty", "stale", "by", "invalid", "old", "new"]
    assert [m.name for m in ordered] == wanted


@pytest.mark.parametrize("every", [0.0, 1e9])
def test_a_run_that_is_stopped_keeps_what_it_has_shown(monkeypatch, tmp_path, every) -> None:
    monkeypatch.setattr(mutate, "KEPT_EVERY", every)
    before_the_third = []

    def rows():
        yield shown("a")
        yield shown("b")
        before_the_third.extend(evidence.load(tmp_path))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mutate.keep(rows(), tmp_path)
    assert {row["feature"] for row in evidence.load(tmp_path)} == {"mutant.a", "mutant.b"}
    assert len(before_the_third) == (2 if every == 0 else 0)


def test_a_detector_that_the_time_box_ends_has_found_nothing(monkeypatch, tmp_path) -> None:
    """It is ended by force, as a fault that hangs is; that one counts as found."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(mutate.sys, "executable", str(slow))
    copy = Copy(tmp_path / "copy")
    copy.deadline = time.monotonic() + 0.2
    for _ in range(2):
        with pytest.raises(mutate.OutOfTime):
            copy.run(mutant())
    copy.deadline = time.monotonic() + 60
    monkeypatch.setattr(mutate, "SECONDS", 0.1)
    assert copy.run(mutant())[0] == 124


def chosen_run(monkeypatch, tmp_path, capsys, rows, mutants, **options) -> tuple[int, str]:
    """(exit code, what it prints) of the verb, whose detectors tell `rows`."""
    monkeypatch.setattr(mutate, "catalogue", lambda: mutants)
    monkeypatch.setattr(mutate, "mutate", lambda chosen, known, deadline: iter(rows))
    config = RunConfig()
    config.parity.output_dir = str(tmp_path)
    for name, value in options.items():
        setattr(config.parity, name, value)
    return mutate.run(config), capsys.readouterr().out


def test_what_time_leaves_undone_is_missing_and_told(monkeypatch, tmp_path, capsys) -> None:
    real = [m for m in catalogue() if not m.honest][:3]
    code, words = chosen_run(monkeypatch, tmp_path, capsys, [shown(real[0].name)], real)
    assert code == 2 and "1 of 3 mutants looked at: 1 of 1 faults found" in words
    everything = [shown(m.name) for m in real]
    code, words = chosen_run(monkeypatch, tmp_path, capsys, everything, real)
    assert code == 0 and "3 of 3 mutants looked at" in words
    missed = [shown(real[0].name, verdict="fail", reason="not found"), *everything[1:]]
    assert chosen_run(monkeypatch, tmp_path, capsys, missed, real)[0] == 1


def test_the_verb_stops_when_its_time_is_over(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(mutate, "Copy", lambda folder: Copy.__new__(Copy))
    config = RunConfig()
    config.parity.output_dir, config.parity.minutes = str(tmp_path), 1e-9
    config.parity.select = "norm-eps-outside"
    assert mutate.run(config) == 2
    words = capsys.readouterr().out
    assert "1 mutants are missing: time ran out after 1e-09 minutes" in words
    assert "0 of 1 mutants looked at" in words
    assert not [*tmp_path.iterdir()]


def test_an_anchor_that_is_gone_does_not_keep_the_others_from_being_looked_at(
    monkeypatch, tmp_path, capsys
) -> None:
    good = next(m for m in catalogue() if not m.honest)
    both = [good, mutant(name="gone", file="gone.py")]
    code, words = chosen_run(monkeypatch, tmp_path, capsys, [shown(good.name)], both)
    assert code == 2
    assert "can't be planted: gone: 0 times in gone.py" in words and "1 of 2 mutants" in words
    code, words = chosen_run(monkeypatch, tmp_path, capsys, [], both, check=True)
    assert code == 2 and "2 mutants, 1 can't be planted" in words
