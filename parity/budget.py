# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity budget`: the size of the goldens against what is allowed in git.

Exit code 0: within the budget; 1: over it; 2: there are no goldens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vllmx.config import RunConfig

from .golden import GOLDENS, MAX_BYTES

MB = 1024 * 1024
TOTAL = 40 * MB


@dataclass(frozen=True)
class Allowance:
    """What a folder of goldens may take, in all and a file."""

    total: int
    item: int


ALLOWED = {
    "ops": Allowance(10 * MB, MAX_BYTES),
    "ops_gpu": Allowance(3 * MB, MAX_BYTES),
    "models": Allowance(21 * MB, 512 * 1024),
    "models_gpu": Allowance(2 * MB, 512 * 1024),
    "schedule": Allowance(8 * MB, 40 * 1024),
    "text": Allowance(1 * MB, 64 * 1024),
}
LOOSE = "beside"
"""Name for files that lie in none of the folders; nothing is allowed there."""
INDEXES = ("index.json", "floors.json")
"""Files that may be larger than one golden."""


@dataclass(frozen=True)
class Usage:
    """One folder: how many files and bytes, and its largest golden."""

    name: str
    files: int
    size: int
    largest: int

    def faults(self) -> list[str]:
        """What is over the allowance."""
        allowed = ALLOWED.get(self.name)
        if allowed is None:
            return [f"{self.name}: no folder of this name has an allowance"]
        found = []
        if self.size > allowed.total:
            found.append(f"{self.name}: {self.size} bytes, {allowed.total} are allowed")
        if self.largest > allowed.item:
            found.append(f"{self.name}: a file of {self.largest} bytes, {allowed.item} are allowed")
        return found


def usage(folder: Path = GOLDENS) -> list[Usage]:
    """The usage of each folder of goldens."""
    found = []
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        sizes = {path: path.stat().st_size for path in part.rglob("*") if path.is_file()}
        goldens = [size for path, size in sizes.items() if path.name not in INDEXES]
        total = sum(sizes.values())
        found.append(Usage(part.name, len(goldens), total, max(goldens, default=0)))
    loose = [path.stat().st_size for path in folder.iterdir() if path.is_file()]
    if loose:
        found.append(Usage(LOOSE, len(loose), sum(loose), max(loose)))
    return found


def faults(found: list[Usage]) -> list[str]:
    """Everything that is over its allowance."""
    listed = [fault for part in found for fault in part.faults()]
    total = sum(part.size for part in found)
    if total > TOTAL:
        listed.append(f"all goldens: {total} bytes, {TOTAL} are allowed")
    return listed


def run(config: RunConfig) -> int:
    """The verb."""
    found = usage()
    for part in found:
        allowed = ALLOWED.get(part.name, Allowance(0, 0)).total
        print(f"{part.name:10} {part.files:5} files {part.size / MB:7.2f} of {allowed / MB:.0f} MB")
    total = sum(part.size for part in found)
    print(
        f"{'all':10} {sum(p.files for p in found):5} files {total / MB:7.2f} of {TOTAL / MB:.0f} MB"
    )
    over = faults(found)
    for fault in over:
        print(f"over: {fault}")
    if not sum(part.files for part in found):
        return 2
    return 1 if over else 0
