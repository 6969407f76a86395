# SPDX-License-Identifier: Apache-2.0
"""Evidence: what a run has shown, one JSON row a cell, in files that are only ever added to.

A row is a plain dict:

    schema      1
    id          sha256 of the rest, canonical JSON
    feature     "op.rms_norm", "model.smollm2-135m", "sched.fcfs", ...
    case        "tinyvar/bf16"; what of the feature was looked at
    provider    "torch", "cpu", "sdpa", ...; "vllmx" where there is no choice
    device      {"name": "cpu", ...}
    mode        "eager", "bs1", "chunked", "graph", ...
    golden_sha  sha256 of the golden's file; "" where the expectation is a test, not a golden
    closure     {"fine": sha256, "coarse": sha256} of what ran (parity/closure.py)
    policy_sha  sha256 of the limits (parity/policy.yaml)
    oracle      {"name", "version", "lane"} that the golden names; "floor": sha256 of the noise
                that is under the limits, where they are multiples of some
    verdict     pass | fail | error | skip | invalid | retract
    checks      {name: {"measured", "limit", "headroom"}}; headroom = limit / measured
    teeth       {wrong copy: caught}; an exact case has them too
    proof       {"selected": provider that ran, "calls": n, ...}
    run         {"git", "dirty", "python", "torch", "numpy", ...}
    seconds     float
    ts          "2026-01-01T00:00:00Z"

and `reason` where the verdict is not pass. A `retract` row names the row it withdraws in
`retracts` and the issue that says why in `reason`; nothing else takes back a failure.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from . import evidence_index, source_stamp
from .digests import canonical
from .libraries import NAMES
from .source_stamp import OUTPUTS

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[1]
EVIDENCE = Path(__file__).resolve().parent / "evidence"
VERDICTS = ("pass", "fail", "error", "skip", "invalid", "retract")
FIELDS = {
    "schema": int,
    "id": str,
    "feature": str,
    "case": str,
    "provider": str,
    "device": dict,
    "mode": str,
    "golden_sha": str,
    "closure": dict,
    "policy_sha": str,
    "oracle": dict,
    "verdict": str,
    "checks": dict,
    "teeth": dict,
    "proof": dict,
    "run": dict,
    "seconds": float,
    "ts": str,
}
ISSUE = re.compile(r"(issue |#)\d+|https://\S+")
"""What the reason of a retraction must name."""
OWN_VALUES = "conf/local/default.yaml"
DIRTY = f"the tree has uncommitted changes or {OWN_VALUES}: these rows can't make anything green"
OPTIONAL = {"reason": str, "retracts": str, "details": dict}

Row = dict[str, Any]


class EvidenceError(ValueError):
    """A row or a file of evidence that can't be believed."""


def row_id(row: Row) -> str:
    """sha256 of all fields but `id`."""
    return hashlib.sha256(canonical({k: v for k, v in row.items() if k != "id"})).hexdigest()


def make_row(**fields: Any) -> Row:
    """A row of `fields`, with schema, time and id; EvidenceError where a field is missing."""
    row: Row = {"schema": SCHEMA, "ts": now(), "policy_sha": "", "teeth": {}, **fields}
    row["seconds"] = float(row.get("seconds", 0.0))
    row["id"] = row_id(row)
    check(row)
    return row


def check(row: Row) -> None:
    """EvidenceError unless `row` has every field, of its type, and the id of its content."""
    known = FIELDS | OPTIONAL
    if missing := FIELDS.keys() - row.keys():
        raise EvidenceError(f"a row lacks {', '.join(sorted(missing))}")
    if unknown := row.keys() - known.keys():
        raise EvidenceError(f"a row has unknown fields {', '.join(sorted(unknown))}")
    for name, value in row.items():
        if type(value) is not known[name]:
            raise EvidenceError(f"{name} is {type(value).__name__}, not {known[name].__name__}")
    if row["schema"] != SCHEMA:
        raise EvidenceError(f"schema {row['schema']}, not {SCHEMA}")
    if row["verdict"] not in VERDICTS:
        raise EvidenceError(f"verdict {row['verdict']!r} is none of {', '.join(VERDICTS)}")
    if row["verdict"] != "pass" and not row.get("reason"):
        raise EvidenceError(f"a row of verdict {row['verdict']} needs its reason")
    if row["verdict"] == "retract":
        if not row.get("retracts"):
            raise EvidenceError("a retract row needs the id that it retracts")
        if not ISSUE.search(row["reason"]):
            raise EvidenceError(
                "a retract row needs the issue that says why in its reason: issue 7"
            )
    if row_id(row) != row["id"]:
        raise EvidenceError(f"row {row['id'][:12]} was changed after it was written")


def append(rows: Iterable[Row], folder: Path = EVIDENCE) -> Path:
    """Write `rows` as one new file of `folder`, whole or not at all; returns its path.

    EvidenceError for no rows at all: a run that showed nothing must not look like one that did.
    """
    listed = list(rows)
    if not listed:
        raise EvidenceError("no rows: a run that looked at nothing is no evidence")
    for row in listed:
        check(row)
    text = b"".join(canonical(row) + b"\n" for row in listed)
    stamp = listed[0]["ts"].replace(":", "").replace("-", "")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stamp}-{_mark(text)}.jsonl"
    partial = path.with_suffix(f".{os.getpid()}.partial")
    partial.write_bytes(text)
    os.replace(partial, path)
    evidence_index.enter(folder)
    return path


def load(folder: Path = EVIDENCE) -> list[Row]:
    """All rows of `folder`, oldest file first; EvidenceError on a damaged or changed line, on a
    file from which lines were taken (its name has the hash of what it was written with), and where
    a whole file is gone (evidence_index.py)."""
    rows: list[Row] = []
    for path in sorted(folder.glob("*.jsonl")):
        data = path.read_bytes()
        for number, line in enumerate(data.decode(errors="replace").splitlines(), 1):
            try:
                row = json.loads(line)
                check(row)
            except (ValueError, AttributeError) as error:
                raise EvidenceError(f"{path.name}:{number}: {error}") from error
            rows.append(row)
        if not path.stem.endswith(f"-{_mark(data)}"):
            raise EvidenceError(
                f"{path.name}: rows were taken out of it or added since it was written; "
                f"`git log -p -- parity/evidence/{path.name}` shows which"
            )
    try:
        evidence_index.check(folder)
    except evidence_index.ListError as error:
        raise EvidenceError(str(error)) from error
    return rows


def _mark(text: bytes) -> str:
    """What a file's name says of its content."""
    return hashlib.sha256(text).hexdigest()[:8]


def now() -> str:
    """The time, UTC, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def run_facts(root: Path = ROOT) -> dict[str, Any]:
    """What the `run` field says: commit, whether the tree differs from it, versions, machine type.

    What git ignores and commands read nevertheless, values in conf/local, counts as a change.
    Where git says that files have changed, a stamp (parity/source_stamp.py) goes before it: the
    copy may lie in a folder of another commit. A folder with neither counts as dirty: nothing says
    what ran.
    """
    stamped = source_stamp.read(root)
    head = _git(root, "rev-parse", "HEAD")
    changed = _git(root, "status", "--porcelain", "--untracked-files=normal")
    commit, dirty = head or "", head is None or changed is None or bool(dirty_paths(changed))
    if dirty and stamped is not None and stamped.commit != commit:
        commit, dirty = stamped.commit, bool(stamped.changed)
    return {
        "git": commit,
        "dirty": dirty or has_own_values(root),
        "python": platform.python_version(),
        "machine": f"{sys.platform}-{platform.machine()}",
        **{name: _version(name) for name in NAMES},
    }


def has_own_values(root: Path) -> bool:
    """Whether conf/local, which is this machine's and in no commit, gives any key a value."""
    path = root / OWN_VALUES
    if not path.is_file():
        return False
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return any(line and not line.startswith("#") for line in lines)


def dirty_paths(porcelain: str) -> list[str]:
    """Paths that `git status --porcelain` lists, without those that runs write."""
    paths = [line[3:].split(" -> ")[-1].strip('"') for line in porcelain.splitlines() if line]
    return [path for path in paths if not path.startswith(OUTPUTS)]


def headroom(measured: float, limit: float) -> float:
    """limit / measured, at most 1e6; 0 where a limit of 0 is broken."""
    if measured <= 0:
        return 1e6
    return min(limit / measured, 1e6)


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.rstrip("\n") if done.returncode == 0 else None


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
