# SPDX-License-Identifier: Apache-2.0
"""The import map names what exists and gives reasons; the runner tells outcomes apart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from vllmx.exceptions import UserError
from vllmx.tasks.parity import load_parity

ROOT = Path(__file__).resolve().parents[2]
MAP = ROOT / "parity" / "upstream_map.yaml"
HEAD = "archive: {requirement: vllm==0.25.0, sha256: abc}\n"

TOY = """
import pytest
from vllm.v1.request import RequestStatus
from vllm.nowhere import Base, decorate, Unbuilt
from vllm.explained import Late


class Child(Base):
    pass


def test_passes():
    assert RequestStatus.WAITING < RequestStatus.RUNNING


@decorate
def test_fails():
    assert RequestStatus.WAITING > RequestStatus.RUNNING


@pytest.mark.parametrize("what", [Unbuilt, Child])
def test_needs_a_missing_symbol(what):
    what()


def test_needs_what_comes_later():
    Late()


def test_member():
    RequestStatus.WAITING.nothing_of_the_kind


def test_skips():
    pytest.skip("no such machine")


def test_is_left_out():
    assert False


class TestIds:
    @pytest.mark.parametrize("n", [1, 2])
    def test_known_difference(self, n):
        assert n == 1
"""

TOY_MAP = (
    HEAD
    + """
modules:
  vllm.v1.request: vllmx.request
  vllm.explained: {later: T9}
tests:
  "tests/v1/toy/test_toy.py::TestIds::test_known_difference[2]": {replaced: by a toy}
deselect:
  "tests/v1/toy/test_toy.py::test_is_left_out": it never ends
"""
)


@pytest.fixture(scope="module")
def harness() -> ModuleType:
    """parity/upstream_tests.py, loaded as `vllmx parity` loads it."""
    load_parity(ROOT)
    import importlib

    return importlib.import_module("vllmx._parity.upstream_tests")


@pytest.fixture(scope="module")
def mapping(harness: ModuleType) -> ModuleType:
    """The parser of the map."""
    return sys.modules["vllmx._parity.upstream_shim.mapping"]


def write_map(folder: Path, text: str) -> Path:
    """`text` as a map file."""
    path = folder / "map.yaml"
    path.write_text(text)
    return path


def test_every_name_that_the_map_gives_exists() -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from parity.upstream_shim import adapters\n"
        "from parity.upstream_shim.finder import resolve\n"
        "from parity.upstream_shim.mapping import load_map\n"
        "m = load_map(Path(sys.argv[1]) / 'parity' / 'upstream_map.yaml')\n"
        "for entry in [*m.modules.values(), *m.symbols.values()]:\n"
        "    [resolve(target) for target in entry.targets]\n"
        "    assert entry.adapter is None or hasattr(adapters, entry.adapter), entry\n"
    )
    command = [sys.executable, "-c", code, str(ROOT)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_absence_and_deselection_has_a_reason(mapping: ModuleType) -> None:
    loaded = mapping.load_map(MAP)
    assert all(reason.strip() for reason in loaded.deselect.values())
    for section in (loaded.modules, loaded.symbols, loaded.members, loaded.tests):
        for name, entry in section.items():
            kind, colon, reason = (entry.absence or "later: x").partition(": ")
            assert kind in mapping.ABSENCES and colon and reason, name


@pytest.mark.parametrize(
    "text, names",
    [
        ("moduls: {}\n", "moduls"),
        ("modules: {vllm.x: {sometime: T1}}\n", "modules.vllm.x: unknown key 'sometime'"),
        ("modules: {vllm.x: {later: T1, absent: no}}\n", "modules.vllm.x"),
        ("modules: {vllm.x: {later: ''}}\n", "modules.vllm.x: a reason"),
        ("modules: {vllm.x: 3}\n", "modules.vllm.x"),
        ("members: {A.b: vllmx.request}\n", "members.A.b: only an absence"),
        ("deselect: {tests/v1/a.py: }\n", "deselect.tests/v1/a.py: a reason"),
        ("suites: v1/core\n", "suites: give a list"),
        ("as_cuda: ['']\n", "as_cuda: a reason or name is missing"),
        ("patience: {tests/v1/a.py: 0}\n", "patience.tests/v1/a.py: give a factor"),
        ("settings: {tests/v1/a.py: 3}\n", "settings.tests/v1/a.py: give engine arguments"),
    ],
)
def test_the_parser_refuses_what_it_does_not_know(
    mapping: ModuleType, tmp_path: Path, text: str, names: str
) -> None:
    with pytest.raises(mapping.MapError, match=names.replace("(", ".")):
        mapping.load_map(write_map(tmp_path, HEAD + text))


def test_an_absence_holds_for_the_modules_under_it(mapping: ModuleType, tmp_path: Path) -> None:
    text = HEAD + "modules: {vllm.a: {later: T1}, vllm.b: vllmx.request}\n"
    loaded = mapping.load_map(write_map(tmp_path, text))
    assert loaded.absence("vllm.a.deep.Name") == "later: T1"
    assert loaded.absence("vllm.b.deep.Name") is None


def test_each_outcome_of_a_toy_test_is_the_right_row(harness: ModuleType, tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "v1" / "toy"
    folder.mkdir(parents=True)
    for part in (folder, folder.parent, folder.parent.parent):
        (part / "__init__.py").touch()
    (folder / "test_toy.py").write_text(TOY)
    files = harness.test_files(tmp_path, ["v1/toy"])
    assert list(files) == ["tests/v1/toy/test_toy.py"]
    ((file, nodes),) = files.items()
    rows = harness.run_file(tmp_path, file, nodes, write_map(tmp_path, TOY_MAP))
    found = {row.id.partition("::")[2]: row for row in rows}
    assert {name: row.status for name, row in found.items()} == {
        "test_passes": "passed",
        "test_fails": "failed",
        "test_needs_a_missing_symbol[Unbuilt]": "missing symbol",
        "test_needs_a_missing_symbol[Child]": "missing symbol",
        "test_needs_what_comes_later": "not applicable",
        "test_member": "missing symbol",
        "test_skips": "skipped",
        "test_is_left_out": "deselected",
        "TestIds::test_known_difference[1]": "passed",
        "TestIds::test_known_difference[2]": "not applicable",
    }
    assert found["test_needs_what_comes_later"].reason == "later: T9"
    assert found["test_needs_a_missing_symbol[Child]"].symbol == "vllm.nowhere.Base"
    assert found["test_member"].symbol == "RequestStatus.nothing_of_the_kind"
    assert found["test_is_left_out"].reason == "it never ends"


def test_an_expected_test_that_does_not_come_up_is_counted(harness: ModuleType) -> None:
    row = harness.Row("tests/v1/a/test_b.py", "failed", "ImportError")
    expected = {"tests/v1/a/test_b.py::test_c", "tests/v1/a/test_d.py::test_e"}
    rows = harness.not_collected([row], expected)
    assert [(r.status, r.reason) for r in rows] == [
        ("not collected", "ImportError"),
        ("not collected", "the id does not come up"),
    ]
    assert len(harness.unexplained(rows, expected)) == 2


def test_an_unknown_folder_is_a_user_error(harness: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="upstream has no tests/v1/nowhere"):
        harness.test_files(tmp_path, ["v1/nowhere"])
