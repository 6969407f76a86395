# SPDX-License-Identifier: Apache-2.0
"""A copy of a checkout without git says what commit it is of, and no file of it can lie."""

import shutil
import subprocess

import pytest

from parity import evidence, source_stamp
from parity.source_stamp import STAMP


@pytest.fixture
def copy(tmp_path):
    """A copy of a small checkout, and the commit that it is of."""
    root, made = tmp_path / "checkout", tmp_path / "copy"
    for name in ("vllmx/a.py", "vllmx/core/b.py", "vllmx.yaml", "conf/c.yaml", "README.md"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    run(root, "init", "-q")
    run(root, "add", "-A")
    run(root, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "one\n\ntwo")
    source_stamp.write(root)
    shutil.copytree(root, made, ignore=shutil.ignore_patterns(".git"))
    return made, run(root, "rev-parse", "HEAD")


def run(root, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_whole_copy_is_of_its_commit(copy) -> None:
    folder, commit = copy
    assert source_stamp.read(folder) == source_stamp.Stamped(commit, ())
    facts = evidence.run_facts(folder)
    assert (facts["git"], facts["dirty"]) == (commit, False)
    (folder / "reports").mkdir()
    (folder / "reports" / "x.py").write_text("")
    (folder / "vllmx" / "__pycache__").mkdir()
    (folder / "vllmx" / "__pycache__" / "a.pyc").write_text("")
    assert not evidence.run_facts(folder)["dirty"], "what runs write themselves"


@pytest.mark.parametrize("change", ["edited", "removed", "added"])
def test_a_changed_copy_is_dirty(copy, change) -> None:
    folder, commit = copy
    name = {"edited": "vllmx/a.py", "removed": "conf/c.yaml", "added": "vllmx/new.py"}[change]
    if change == "removed":
        (folder / name).unlink()
    else:
        (folder / name).write_text("changed")
    assert source_stamp.read(folder) == source_stamp.Stamped(commit, (name,))
    assert evidence.run_facts(folder)["dirty"]


@pytest.mark.parametrize("part", ["commit", "body", "files"])
def test_a_forged_stamp_says_nothing(copy, part) -> None:
    folder, commit = copy
    (folder / "vllmx" / "a.py").write_text("changed")
    text = (folder / STAMP).read_text()
    changed = source_stamp._blob(folder / "vllmx" / "a.py")
    original = source_stamp._hash("blob", b"vllmx/a.py")
    forged = {
        "commit": text.replace(commit, "0" * 40),
        "body": text.replace("two", "six"),
        "files": text.replace(original, changed),
    }[part]
    assert forged != text
    (folder / STAMP).write_text(forged)
    assert source_stamp.read(folder) is None
    assert evidence.run_facts(folder)["git"] == "" and evidence.run_facts(folder)["dirty"]


def test_without_a_stamp_nothing_says_what_ran(copy) -> None:
    folder, _ = copy
    (folder / STAMP).unlink()
    assert source_stamp.read(folder) is None
    assert evidence.run_facts(folder)["dirty"]
