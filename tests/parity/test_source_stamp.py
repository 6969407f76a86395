# SPDX-License-Identifier: Apache-2.0
"""A copy of a checkout without git says what commit it is of, and no file of it can lie."""

import shutil
import subprocess

import pytest

from parity import evidence, source_stamp
from parity.checkout import ROOT
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


CHANGES = {
    "edited": "vllmx/a.py",
    "removed": "conf/c.yaml",
    "added": "vllmx/new.py",
    "added at the top": "torch.py",
    "added of another kind": "vllmx/core/c.so",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_dirty(copy, change) -> None:
    folder, commit = copy
    name = CHANGES[change]
    if change == "removed":
        (folder / name).unlink()
    else:
        (folder / name).write_text("changed")
    assert source_stamp.read(folder) == source_stamp.Stamped(commit, (name,))
    assert evidence.run_facts(folder)["dirty"]


@pytest.mark.parametrize("stamped", [True, False])
def test_values_of_this_machine_alone_make_a_tree_dirty(copy, stamped) -> None:
    """They are in no commit and git ignores them, but every command is composed with them."""
    folder, _ = copy
    if not stamped:
        (folder / STAMP).unlink()
        (folder / ".gitignore").write_text("conf/local/\n")
        run(folder, "init", "-q")
        run(folder, "add", "-A")
        run(folder, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "one")
    assert not evidence.run_facts(folder)["dirty"]
    own = folder / evidence.OWN_VALUES
    own.parent.mkdir(exist_ok=True)
    if not stamped:
        own.write_text("# parity: {provider: torch}\n\n")
        assert not evidence.run_facts(folder)["dirty"], "it says nothing"
    own.write_text("parity: {provider: cpu}\n")
    assert evidence.run_facts(folder)["dirty"]


def test_the_file_of_own_values_is_the_one_that_is_composed() -> None:
    """Else its values would count for nothing."""
    text = (ROOT / "conf" / "config.yaml").read_text()
    own = evidence.OWN_VALUES.removeprefix("conf/").removesuffix(".yaml").split("/")
    assert f"- optional {': '.join(own)} #" in text and text.count("optional") == 1


@pytest.mark.parametrize("text", ["", "abc\n", "abc\nx\n", "abc\n4\ntree"])
def test_a_torn_stamp_says_nothing(copy, text) -> None:
    folder, _ = copy
    (folder / STAMP).write_text(text)
    assert source_stamp.read(folder) is None


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


def test_a_stamp_goes_before_the_git_of_a_copy(copy) -> None:
    folder, commit = copy
    run(folder, "init", "-q")
    run(folder, "add", "README.md")
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    run(folder, *who, "commit", "-qm", "another")
    facts = evidence.run_facts(folder)
    assert (facts["git"], facts["dirty"]) == (commit, False)


def test_without_a_stamp_nothing_says_what_ran(copy) -> None:
    folder, _ = copy
    (folder / STAMP).unlink()
    assert source_stamp.read(folder) is None
    assert evidence.run_facts(folder)["dirty"]
