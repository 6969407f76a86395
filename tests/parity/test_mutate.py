# SPDX-License-Identifier: Apache-2.0
"""Planted faults: where they are, what counts as found, and that the tree stays as it was."""

from collections import Counter
from pathlib import Path

import pytest

from parity import mutate
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
