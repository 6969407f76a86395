# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity mutate [select=...] [check=true]`: plant faults of mutants.yaml, see them found.

A fault is one change of the text of our own source, made in a copy of the repository, never in the
tree. Its detector must be green on the untouched copy, and must turn red with the fault; an honest
alternate must leave it green. With `check` only the anchors are looked at: every text to be
replaced must be there exactly once. Exit code 1 if too many faults live or an alternate is refused.
"""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import evidence
from .evidence import Row, make_row
from .mutant_detectors import Detectors

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = Path(__file__).with_name("mutants.yaml")
COPIED = ("vllmx", "parity", "oracles", "conf")
LINKED = ("tests", "pyproject.toml", "noxfile.py", "README.md", "docs", "reports", ".ci")
FIELDS = {"class", "file", "find", "replace", "by"}
WANTED = 0.95
"""Share of the faults that must be found."""
SECONDS = 900
NOT_LOOKED = (2, 3)
"""Exit codes of a replay that was invalid or blocked."""


@dataclass(frozen=True)
class Mutant:
    """One change and what looks at it; an honest one changes nothing that matters."""

    name: str
    category: str
    file: str
    find: str
    replace: str
    by: str
    honest: bool

    def command(self) -> list[str]:
        """What is run in the copy."""
        kind, _, rest = self.by.partition(" ")
        if kind == "replay":
            feature, provider = rest.split()
            if feature.startswith(("op.", "model.")) and "/" not in feature:
                feature += "/"  # that one, not all whose names begin so
            select = [f"select={feature}", f"provider={provider}"]
            return ["-m", "vllmx", "parity", "replay", *select, "output_dir=evidence"]
        if kind == "schedule":
            return ["-m", "parity.replay_schedule"]
        return ["-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", self.by]


def catalogue(path: Path = CATALOGUE) -> list[Mutant]:
    """Every mutant, honest alternates last; UserError for an entry that is not one."""
    raw: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = []
    for section, honest in (("mutants", False), ("honest", True)):
        for name, entry in raw[section].items():
            if set(entry) != FIELDS or entry["find"] == entry["replace"]:
                raise UserError(f"{path.name}: {name} needs {', '.join(sorted(FIELDS))}.")
            parts = {key: entry[key] for key in ("file", "find", "replace", "by")}
            found.append(Mutant(name, entry["class"], honest=honest, **parts))
    return found


def closure_of(
    mutant: Mutant, root: Path = ROOT, detectors: Detectors | None = None
) -> dict[str, str]:
    """What a verdict depends on: the mutant as it is written, the file that it changes, and all
    that its detector judges by. `detectors` saves reading that again for each of many."""
    path = root / mutant.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    judged_by = (detectors or Detectors(root)).sha(mutant.by)
    sha = hashlib.sha256(f"{mutant}\n{judged_by}\n{text}".encode()).hexdigest()
    return {"fine": sha, "coarse": sha}


def dead_anchors(mutants: list[Mutant], root: Path = ROOT) -> list[str]:
    """The mutants whose text is not in their file exactly once, or that leave no Python there:
    a file that can't be read is no fault that a comparison finds."""
    found = []
    for mutant in mutants:
        path = root / mutant.file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        count = text.count(mutant.find)
        if count != 1:
            found.append(f"{mutant.name}: {count} times in {mutant.file}")
        elif path.suffix == ".py":
            try:
                ast.parse(text.replace(mutant.find, mutant.replace))
            except SyntaxError as error:
                found.append(f"{mutant.name}: {mutant.file} is no Python with it: {error}")
    return found


class Copy:
    """A copy of the repository in which faults are planted and taken out again."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        self.folder = folder
        skip = shutil.ignore_patterns("__pycache__", "evidence", "goldens")
        for name in COPIED:
            shutil.copytree(root / name, folder / name, ignore=skip)
        (folder / "parity" / "goldens").symlink_to(root / "parity" / "goldens")
        for name in LINKED:
            if (root / name).exists():
                (folder / name).symlink_to(root / name)

    def run(self, mutant: Mutant) -> tuple[int, str]:
        """(exit code, last lines) of the mutant's detector."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONHASHSEED": "0",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, *mutant.command()],
                cwd=self.folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS,
            )
        except subprocess.TimeoutExpired:
            return 124, f"no end in {SECONDS} s"
        told = (done.stdout + done.stderr).replace(f"{self.folder}/", "")  # no one else has it
        return done.returncode, " | ".join(told.strip().splitlines()[-3:])

    def planted(self, mutant: Mutant) -> tuple[int, str]:
        """The same with the fault in place."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(mutant.find, mutant.replace), encoding="utf-8")
        try:
            return self.run(mutant)
        finally:
            path.write_text(text, encoding="utf-8")


def judge(mutant: Mutant, clean: tuple[int, str], planted: tuple[int, str]) -> tuple[str, str]:
    """(verdict, reason): pass if a fault was found or an honest alternate was not refused.

    A detector that is red without the fault shows nothing, nor does a replay that could not look at
    all: a golden it did not find, a provider that isn't there any more. Any other red end counts as
    found: a failed comparison, a crash, or no end at all.
    """
    if clean[0] != 0:
        return "invalid", f"the detector is red without the fault: {clean[1]}"
    if mutant.by.startswith("replay ") and planted[0] in NOT_LOOKED:
        return "invalid", f"with it in place the replay could not look: {planted[1]}"
    found = planted[0] != 0
    if mutant.honest:
        return ("fail", f"an honest alternate is refused: {planted[1]}") if found else ("pass", "")
    return ("pass", "") if found else ("fail", f"not found by {mutant.by}")


def mutate(mutants: list[Mutant]) -> list[Row]:
    """A row of evidence for every mutant."""
    rows: list[Row] = []
    run = evidence.run_facts()
    clean: dict[str, tuple[int, str]] = {}
    detectors = Detectors(ROOT)
    # As the code is before anything is run.
    known = {mutant.name: closure_of(mutant, ROOT, detectors) for mutant in mutants}
    with tempfile.TemporaryDirectory() as work:
        copy = Copy(Path(work))
        for mutant in mutants:
            started = time.monotonic()
            if mutant.by not in clean:
                clean[mutant.by] = copy.run(mutant)
            planted = copy.planted(mutant) if clean[mutant.by][0] == 0 else (0, "")
            verdict, reason = judge(mutant, clean[mutant.by], planted)
            kind = "honest alternate" if mutant.honest else "fault"
            print(f"{verdict:7} {kind} {mutant.name}: {reason or planted[1][-160:]}", flush=True)
            facts: dict[str, Any] = {"reason": reason} if reason else {}
            rows.append(
                make_row(
                    feature=f"mutant.{mutant.name}",
                    case=mutant.by,
                    provider="vllmx",
                    device={"name": "cpu"},
                    mode="honest" if mutant.honest else "planted",
                    golden_sha="",
                    closure=known[mutant.name],
                    oracle={},
                    verdict=verdict,
                    checks={},
                    proof={"exit_code": planted[0]},
                    run=run,
                    seconds=round(time.monotonic() - started, 2),
                    details={"category": "honest" if mutant.honest else mutant.category},
                    **facts,
                )
            )
    return rows


def run(config: RunConfig) -> int:
    """The verb."""
    mutants = catalogue()
    if dead := dead_anchors(mutants):
        print("\n".join(dead))
        return 2
    words = [word.strip() for word in (config.parity.select or "").split(",")]
    chosen = [
        m for m in mutants if any(x.startswith(w) for x in (m.name, m.category) for w in words)
    ]
    if config.parity.check:
        print(f"{len(mutants)} mutants, every anchor is there once")
        return 0
    if not chosen:
        raise UserError(f"parity mutate select={config.parity.select}: no mutant has this name.")
    rows = mutate(chosen)
    output = config.parity.output_dir
    evidence.append(rows, Path(output) if output else evidence.EVIDENCE)
    faults = [row for row in rows if row["mode"] == "planted"]
    caught = sum(row["verdict"] == "pass" for row in faults)
    refused = sum(row["verdict"] == "fail" for row in rows if row["mode"] == "honest")
    invalid = sum(row["verdict"] == "invalid" for row in rows)
    print(
        f"{caught} of {len(faults)} faults found, {refused} of {len(rows) - len(faults)} honest "
        f"alternates refused, {invalid} invalid"
    )
    if invalid:
        return 2
    return 0 if caught >= WANTED * len(faults) and not refused else 1
