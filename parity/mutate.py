# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity mutate [select=...] [minutes=60] [check=true]`: plant faults of mutants.yaml, see
them found.

A fault is one change of the text of our own source, made in a copy of the repository, never in the
tree. Its detector must be green on the untouched copy, and must turn red with the fault; an honest
alternate must leave it green. With `check` only the anchors are looked at: every text to be
replaced must be there exactly once. What was never shown comes first, then what has waited longest;
what `minutes` leaves undone is missing. Exit code 1 if too many faults live or an alternate is
refused; else 2 if something was invalid or is missing.
"""

from __future__ import annotations

import ast
import hashlib
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
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
KEPT_EVERY = 120.0
"""Seconds after which rows are written down, so that no end of a run costs more than those."""
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


class OutOfTime(Exception):
    """The time box ended while a detector ran: it has found nothing, nor has it not."""


class Copy:
    """A copy of the repository in which faults are planted and taken out again.

    `deadline`, of time.monotonic, ends a detector that runs then with OutOfTime.
    """

    deadline = math.inf

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
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise OutOfTime
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
                timeout=min(SECONDS, left),
            )
        except subprocess.TimeoutExpired:
            if left < SECONDS:
                raise OutOfTime from None
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


def stalest_first(
    mutants: Sequence[Mutant], known: Mapping[str, Mapping[str, str]], rows: Sequence[Row]
) -> list[Mutant]:
    """`mutants`, those never shown first, then those shown with other code than `known` has, then
    the rest; of two alike the one that was looked at longer ago. Only a clean tree shows."""
    told: dict[str, Row] = {}
    for row in rows:
        newest = told.get(row["feature"])
        if not row["run"].get("dirty") and (newest is None or newest["ts"] <= row["ts"]):
            told[row["feature"]] = row

    def waits(mutant: Mutant) -> tuple[int, str]:
        row = told.get(f"mutant.{mutant.name}")
        if row is None:
            return 0, ""
        stale = row["case"] != mutant.by or row["closure"] != known[mutant.name]
        return (1 if stale or row["verdict"] not in ("pass", "fail") else 2), row["ts"]

    return sorted(mutants, key=waits)


def mutate(
    mutants: Sequence[Mutant], known: Mapping[str, dict[str, str]], deadline: float = math.inf
) -> Iterator[Row]:
    """A row of evidence for every mutant, in turn, for as long as there is time.

    known: name -> closure, of the code as it is before anything is run; deadline: of
    time.monotonic.
    """
    run = evidence.run_facts()
    clean: dict[str, tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as work:
        copy = Copy(Path(work))
        copy.deadline = deadline
        for mutant in mutants:
            started = time.monotonic()
            try:
                if mutant.by not in clean:
                    clean[mutant.by] = copy.run(mutant)
                planted = copy.planted(mutant) if clean[mutant.by][0] == 0 else (0, "")
            except OutOfTime:
                return
            verdict, reason = judge(mutant, clean[mutant.by], planted)
            kind = "honest alternate" if mutant.honest else "fault"
            print(f"{verdict:7} {kind} {mutant.name}: {reason or planted[1][-160:]}", flush=True)
            facts: dict[str, Any] = {"reason": reason} if reason else {}
            yield make_row(
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


def keep(rows: Iterator[Row], folder: Path) -> list[Row]:
    """All of `rows`, which are evidence in `folder` at the latest KEPT_EVERY seconds after they
    came, and when they end, however they end."""
    kept: list[Row] = []
    waiting: list[Row] = []
    written = time.monotonic()
    try:
        for row in rows:
            waiting.append(row)
            if time.monotonic() - written >= KEPT_EVERY:
                evidence.append(waiting, folder)
                kept, waiting, written = [*kept, *waiting], [], time.monotonic()
    finally:
        if waiting:
            evidence.append(waiting, folder)
    return [*kept, *waiting]


def run(config: RunConfig) -> int:
    """The verb."""
    options = config.parity
    deadline = time.monotonic() + 60 * options.minutes
    mutants = catalogue()
    words = [word.strip() for word in (options.select or "").split(",")]
    chosen = [
        m for m in mutants if any(x.startswith(w) for x in (m.name, m.category) for w in words)
    ]
    if not chosen:
        raise UserError(f"parity mutate select={options.select}: no mutant has this name.")
    dead = dead_anchors(chosen)
    for fault in dead:
        print(f"can't be planted: {fault}")
    if options.check:
        print(f"{len(chosen)} mutants, {len(dead)} can't be planted")
        return 2 if dead else 0
    living = [mutant for mutant in chosen if not dead_anchors([mutant])]
    detectors = Detectors(ROOT)
    known = {mutant.name: closure_of(mutant, ROOT, detectors) for mutant in living}
    folder = Path(options.output_dir) if options.output_dir else evidence.EVIDENCE
    earlier = evidence.load(folder) if folder.is_dir() else []
    rows = keep(mutate(stalest_first(living, known, earlier), known, deadline), folder)
    if left := len(living) - len(rows):
        print(f"{left} mutants are missing: time ran out after {options.minutes:g} minutes")
    print(told(rows, len(chosen)))
    return exit_code(rows, len(chosen))


def told(rows: Sequence[Row], asked: int) -> str:
    """What a run that was asked for `asked` mutants came to."""
    faults = [row for row in rows if row["mode"] == "planted"]
    caught = sum(row["verdict"] == "pass" for row in faults)
    refused = sum(row["verdict"] == "fail" for row in rows if row["mode"] == "honest")
    invalid = sum(row["verdict"] == "invalid" for row in rows)
    return (
        f"{len(rows)} of {asked} mutants looked at: {caught} of {len(faults)} faults found, "
        f"{refused} of {len(rows) - len(faults)} honest alternates refused, {invalid} invalid"
    )


def exit_code(rows: Sequence[Row], asked: int) -> int:
    """1: fewer than WANTED of the faults that were looked at are found, or an alternate is refused;
    2: a detector was invalid, or a mutant is missing."""
    faults = [row["verdict"] for row in rows if row["mode"] == "planted"]
    judged = [verdict for verdict in faults if verdict != "invalid"]
    refused = any(row["verdict"] == "fail" for row in rows if row["mode"] == "honest")
    if refused or judged.count("pass") < WANTED * len(judged):
        return 1
    return 2 if len(rows) < asked or any(row["verdict"] == "invalid" for row in rows) else 0
