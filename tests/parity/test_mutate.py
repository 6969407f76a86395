# SPDX-License-Identifier: Apache-2.0
"""Planted faults: where they are, what counts as found, and that the tree stays as it was."""

from collections import Counter
from pathlib import Path

import pytest

from parity import mutant_detectors, mutate
from parity.mutate import Copy, Mutant, catalogue, dead_anchors, judge
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
    (row,) = mutate.mutate(chosen)
    assert row["verdict"] == "pass" and row["proof"]["exit_code"] != 0
