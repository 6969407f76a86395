# SPDX-License-Identifier: Apache-2.0
"""Rows of evidence and closure hashes: what was shown can't be edited, and what changed is seen."""

import ast
import hashlib
import json
import re
import shutil
import subprocess

import pytest

from parity import closure, evidence, evidence_index
from parity.evidence import EvidenceError, make_row


def row(**more):
    fields = {
        "feature": "op.x",
        "case": "plain/f32",
        "provider": "torch",
        "device": {"name": "cpu"},
        "mode": "eager",
        "golden_sha": "",
        "closure": {"fine": "", "coarse": ""},
        "oracle": {},
        "verdict": "pass",
        "checks": {},
        "proof": {},
        "run": {},
        **more,
    }
    return make_row(**fields)


def test_rows_come_back_as_they_were_written(tmp_path):
    first, second = row(), row(verdict="fail", reason="rmse")
    path = evidence.append([first, second], tmp_path)
    assert evidence.load(tmp_path) == [first, second]
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "index.txt"]
    assert first["id"] != second["id"]
    evidence.append([row(ts="2030-01-01T00:00:00Z")], tmp_path)
    assert len(evidence.load(tmp_path)) == 3


def test_an_edited_line_is_refused(tmp_path):
    path = evidence.append([row(verdict="fail", reason="rmse")], tmp_path)
    edited = json.loads(path.read_text()) | {"verdict": "pass"}
    path.write_text(json.dumps(edited) + "\n")
    with pytest.raises(EvidenceError, match="was changed after it was written"):
        evidence.load(tmp_path)
    path.write_text("{")
    with pytest.raises(EvidenceError, match=f"{path.name}:1"):
        evidence.load(tmp_path)


def test_a_failure_can_not_be_cut_out_of_its_file(tmp_path):
    path = evidence.append([row(), row(verdict="fail", reason="rmse")], tmp_path)
    kept, cut = path.read_text().splitlines(keepends=True)
    for text in (kept, kept + cut + kept, ""):
        path.write_text(text)
        with pytest.raises(EvidenceError, match=f"{path.name}: rows were taken out"):
            evidence.load(tmp_path)
    path.write_text(kept + cut)
    assert len(evidence.load(tmp_path)) == 2


def test_a_whole_file_can_not_be_deleted(tmp_path):
    bad = evidence.append([row(verdict="fail", reason="rmse")], tmp_path)
    evidence.append([row(ts="2030-01-01T00:00:00Z")], tmp_path)
    text = bad.read_bytes()
    bad.unlink()
    with pytest.raises(EvidenceError, match=f"{bad.name} is listed in index.txt and gone"):
        evidence.load(tmp_path)
    bad.write_bytes(text)
    assert len(evidence.load(tmp_path)) == 2
    index = tmp_path / "index.txt"
    lines = index.read_text()
    assert lines.count("\n") == 2
    index.write_text(lines + lines.splitlines()[1] + "\n")
    assert len(evidence.load(tmp_path)) == 2, "a line that both sides of a merge had"
    for wrong in (f"{bad.name} {'0' * 64}", "no hash", bad.name):
        index.write_text(f"{lines}{wrong}\n")
        with pytest.raises(EvidenceError, match=r"index\.txt:3"):
            evidence.load(tmp_path)
    index.write_text(lines.replace(hashlib.sha256(text).hexdigest(), "0" * 64))
    with pytest.raises(EvidenceError, match=r"not the file that index\.txt lists"):
        evidence.load(tmp_path)


def test_a_file_that_came_from_elsewhere_is_listed_by_the_next_run(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    moved = evidence.append([row()], there)
    evidence.append([row(ts="2030-01-01T00:00:00Z")], here)
    shutil.copy(moved, here)
    assert evidence_index.unlisted(here) == [moved.name]
    assert len(evidence.load(here)) == 2
    evidence.append([row(ts="2031-01-01T00:00:00Z")], here)
    assert evidence_index.unlisted(here) == []
    (here / moved.name).unlink()
    with pytest.raises(EvidenceError, match="gone"):
        evidence.load(here)


def test_a_commit_that_takes_out_file_and_line_is_found(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    folder = tmp_path / "parity" / "evidence"
    assert evidence_index.removed(tmp_path) == []
    git("init", "-q")
    bad = evidence.append([row(verdict="fail", reason="rmse")], folder)
    git("add", "-A")
    git("commit", "-qm", "shown")
    evidence.append([row(ts="2030-01-01T00:00:00Z")], folder)
    git("add", "-A")
    git("commit", "-qm", "shown again")
    assert evidence_index.removed(tmp_path) == []
    bad.unlink()
    (folder / "index.txt").unlink()
    evidence_index.enter(folder)
    assert len(evidence.load(folder)) == 1
    git("add", "-A")
    git("commit", "-qm", "tidied")
    (found,) = evidence_index.removed(tmp_path)
    assert found.endswith(f" parity/evidence/{bad.name}")


def test_no_evidence_of_this_repository_was_ever_removed_and_all_of_it_is_listed():
    assert evidence_index.removed(evidence.ROOT) == []
    there = {path.name for path in evidence.EVIDENCE.glob("*.jsonl")}
    listed = set(evidence_index.listed(evidence.EVIDENCE))
    assert listed == there and len(there) > 10, "a run whose rows were thrown away may be listed"
    assert len(evidence.load()) > 1000


def test_a_row_that_says_too_little_or_too_much_is_refused(tmp_path):
    for more in (
        {"verdict": "maybe"},
        {"verdict": "fail"},
        {"verdict": "retract", "reason": "issue 5"},
        {"verdict": "retract", "reason": "flaky", "retracts": "0" * 64},
        {"unknown": 1},
        {"case": 3},
        {"checks": {"rmse": {"measured": float("nan")}}},
    ):
        with pytest.raises((EvidenceError, ValueError)):
            row(**more)
    assert row(verdict="retract", reason="issue 5", retracts="0" * 64)["id"]
    whole = row()
    with pytest.raises(EvidenceError, match="lacks proof"):
        evidence.check({k: v for k, v in whole.items() if k != "proof"})


def test_no_rows_are_no_evidence(tmp_path):
    with pytest.raises(EvidenceError, match="no rows"):
        evidence.append([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_runs_write_does_not_make_a_tree_dirty():
    told = " M vllmx/cli.py\n?? parity/evidence/1.jsonl\n M reports/index.html\nR  a.py -> b.py\n"
    assert evidence.dirty_paths(told) == ["vllmx/cli.py", "b.py"]


def test_a_folder_that_is_no_checkout_counts_as_dirty(tmp_path):
    facts = evidence.run_facts(tmp_path)
    assert facts["dirty"] is True and facts["git"] == ""


# -------------------------------------------------------------------------------- closures

SOURCES = {
    "vllmx/__init__.py": "",
    "vllmx/ops.py": '''
"""Doc."""
from vllmx.helpers import half, unused
from vllmx import tables
import math

TABLE = {}
TABLE["a"] = 1
LIMIT = 3  # why


def op(x):
    """What it does."""
    return half(x) + LIMIT + TABLE["a"] + tables.first(x)


def other(x):
    return unused(x)
''',
    "vllmx/helpers.py": "def half(x):\n    return x / 2\n\n\ndef unused(x):\n    return x\n",
    "vllmx/tables.py": "def first(x):\n    return x\n\n\ndef second(x):\n    return x\n",
    "vllmx/native.py": 'SOURCE = "native.c"\n\n\ndef run():\n    return SOURCE\n',
    "vllmx/native.c": "int one(void) { return 1; }\n",
    "parity/judge.py": "from .limits import K\n\n\ndef judge(x):\n    return x < K\n",
    "parity/limits.py": "K = 2\n",
    "vllmx/late.py": "def run():\n    from vllmx.helpers import half\n\n    return half(1)\n",
    "vllmx/whole.py": "from vllmx.dynamic import made\n\n\ndef run():\n    return made()\n",
    "vllmx/dynamic.py": "globals()['made'] = lambda: 1\n",
}


@pytest.fixture
def root(tmp_path):
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


CHANGES = [
    # symbol, file, find, replace, what differs
    ("vllmx/ops.py:op", "vllmx/ops.py", "LIMIT = 3", "LIMIT = 4", {"fine", "coarse"}),
    ("vllmx/ops.py:op", "vllmx/ops.py", '["a"] = 1', '["a"] = 2', {"fine", "coarse"}),
    ("vllmx/ops.py:op", "vllmx/helpers.py", "x / 2", "x / 3", {"fine", "coarse"}),
    (
        "vllmx/ops.py:op",
        "vllmx/tables.py",
        "first(x):\n    return x",
        "first(x):\n    return -x",
        {"fine", "coarse"},
    ),
    ("vllmx/ops.py:op", "vllmx/ops.py", "# why", "# because", set()),
    ("vllmx/ops.py:op", "vllmx/ops.py", "What it does.", "What this does.", set()),
    ("vllmx/ops.py:op", "vllmx/ops.py", "return unused(x)", "return 2 * unused(x)", {"coarse"}),
    ("vllmx/ops.py:op", "vllmx/helpers.py", "    return x\n", "    return 9\n", {"coarse"}),
    ("vllmx/ops.py:op", "vllmx/tables.py", "second", "third", {"coarse"}),
    ("vllmx/ops.py:op", "vllmx/native.c", "return 1", "return 2", set()),
    ("vllmx/native.py:run", "vllmx/native.c", "return 1", "return 2", {"fine"}),
    ("parity/judge.py:judge", "parity/limits.py", "K = 2", "K = 3", {"fine", "coarse"}),
    ("vllmx/late.py:run", "vllmx/helpers.py", "x / 2", "x / 3", {"fine", "coarse"}),
    ("vllmx/whole.py:run", "vllmx/dynamic.py", "lambda: 1", "lambda: 2", {"fine", "coarse"}),
    (
        "vllmx/ops.py",
        "vllmx/ops.py",
        "return unused(x)",
        "return 2 * unused(x)",
        {"fine", "coarse"},
    ),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda c: f"{c[0]} {c[3]!r}"[:60])
def test_a_closure_differs_with_what_is_reached_and_with_nothing_else(change, root):
    symbol, file, find, replace, differs = change
    before = closure.closure([symbol], root=root)
    text = (root / file).read_text()
    assert find in text
    (root / file).write_text(text.replace(find, replace, 1))
    after = closure.closure([symbol], root=root)
    assert {key for key in before if before[key] != after[key]} == differs


def test_a_closure_of_nothing_or_of_what_is_gone_is_refused(root):
    with pytest.raises(ValueError, match="nothing"):
        closure.closure([], root=root)
    with pytest.raises(KeyError, match="defines no gone"):
        closure.closure(["vllmx/ops.py:gone"], root=root)
    with pytest.raises(FileNotFoundError):
        closure.closure(["vllmx/gone.py:op"], root=root)


def test_a_renamed_symbol_and_another_version_differ(root):
    one = closure.closure(["vllmx/ops.py:op"], root=root)
    with_version = closure.closure(["vllmx/ops.py:op"], {"triton": "3.9"}, root=root)
    assert with_version["fine"] != one["fine"] and with_version["coarse"] == one["coarse"]
    text = (root / "vllmx/ops.py").read_text()
    (root / "vllmx/ops.py").write_text(text.replace("def op(", "def op2("))
    assert closure.closure(["vllmx/ops.py:op2"], root=root)["fine"] != one["fine"]


def test_symbols_of_our_own_functions():
    from vllmx.attention.backends.torch_sdpa import TorchSDPABackend
    from vllmx.ir.ops.layernorm import rms_norm

    assert closure.symbol_of(rms_norm.fn) == "vllmx/ir/ops/layernorm.py:rms_norm"
    backend = "vllmx/attention/backends/torch_sdpa.py:TorchSDPABackend"
    assert closure.symbol_of(TorchSDPABackend.op_call) == backend
    found = closure.items([backend])
    assert "vllmx/attention/backends/torch_sdpa.py:_attend" in found
    cpu = closure.items(["vllmx/kernels/cpu_ops.py:_rms_norm"])
    assert "vllmx/kernels/cpu_ops.py:_doubled" in cpu
    assert "vllmx/ir/ops/layernorm.py:rms_norm" in cpu


def test_a_tree_has_one_text_for_every_python(monkeypatch) -> None:
    source = "class A:\n    def f(self, x: int = 1) -> str:\n        return f'{x!r} {x:>3}'\n"
    tree = ast.parse(source)
    plain = ast.dump(tree)
    known = closure.dump(tree)
    assert "type_params" not in known

    def of_312(tree: ast.AST, **options: object) -> str:
        """What Python 3.12 says of functions and classes."""
        return re.sub(r"(decorator_list=\[\][^)]*?)\)", r"\1, type_params=[])", plain)

    monkeypatch.setattr(closure.ast, "dump", of_312)
    assert "type_params" in closure.ast.dump(tree)
    assert closure.dump(tree) == known
