# SPDX-License-Identifier: Apache-2.0
"""What the detector of a planted fault judges by: its code, goldens, floors and limits.

A fault that was found is found no more once its detector is weakened, so that all of this is in the
closure of its evidence. The code is that of a test and its helpers, or of the replay, and what
those import of parity/ and oracles/; vllmx itself is what is judged.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from . import policy
from .behaviour import Closures
from .digests import file_sha

START = {"replay": "parity/replay.py", "schedule": "parity/replay_schedule.py"}
"""First word of a detector -> the file that runs it; any other detector is a test."""
INDEXED = ("ops", "models", "text")
FLOORS = "floors.json"


class Detectors:
    """Detectors in the checkout at `root`; files are read once."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.code = Closures(root)
        self.goldens = root / "parity" / "goldens"
        self.sha = cache(self._sha)
        self.entries = cache(self._entries)

    def _sha(self, by: str) -> str:
        """sha256 of all that decides on what the detector `by` says."""
        kind, _, rest = by.partition(" ")
        start = START.get(kind, by.partition("::")[0])
        files = self.code.judges(start) if self.code.is_file(start) else []
        lines = [f"{name} {self.code.code(name)}" for name in files]
        limits = self.root / "parity" / policy.POLICY.name
        lines.append(f"policy {_bytes_sha(limits)}")
        if kind == "replay":
            lines += self._goldens_of(rest.split()[0])
        elif kind == "schedule":
            lines += self._traces()
        elif "parity/golden.py" in files:  # a test that may read any
            lines += [line for where in INDEXED for line in self.entries(where)] + self._traces()
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _goldens_of(self, feature: str) -> list[str]:
        area, _, name = feature.partition(".")
        where = {"model": "models", "text": "text"}.get(area, "ops")
        return [
            line for line in self.entries(where) if line.split(" ", 2)[1].startswith(f"{name}/")
        ]

    def _traces(self) -> list[str]:
        files = sorted((self.goldens / "schedule").glob("*"))
        return [f"trace {path.name} {_bytes_sha(path)}" for path in files if path.is_file()]

    def _entries(self, where: str) -> list[str]:
        return [
            *self._listed(where, "index.json", "goldens"),
            *self._listed(where, FLOORS, "floors"),
        ]

    def _listed(self, where: str, file: str, key: str) -> Iterator[str]:
        path = self.goldens / where / file
        if path.is_file():
            for name, entry in sorted(json.loads(path.read_text(encoding="utf-8"))[key].items()):
                yield f"{key} {name} {json.dumps(entry, sort_keys=True)}"


def _bytes_sha(path: Path) -> str:
    return file_sha(path) if path.is_file() else ""
