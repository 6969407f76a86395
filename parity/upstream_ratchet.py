# SPDX-License-Identifier: Apache-2.0
"""upstream_passing.txt: which of upstream's tests pass, upstream itself and vllmx.

A line is two marks and a test id: `u` if upstream passes the test offline on a CPU, `v` if vllmx
does, `-` in the place of either. A `v` is a ratchet: a run that finds the test not passing fails
with its name, whatever the map says. Runs into reports/ add marks; taking one away is a decision
that is made by hand.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from vllmx.exceptions import UserError

HEADER = (
    "# u: upstream passes the test offline on a CPU. v: vllmx passes it, and must go on to.\n"
    "# Written by `vllmx parity upstream-tests output_dir=reports`, which only adds.\n"
)
MARKS = ("uv", "u-", "-v")


@dataclass(frozen=True)
class Passing:
    """What upstream_passing.txt says, as sets of test ids."""

    upstream: frozenset[str]
    here: frozenset[str]

    def under(self, prefixes: Iterable[str]) -> Passing:
        """The part that `prefixes` select."""
        wanted = list(prefixes)

        def part(ids: frozenset[str]) -> frozenset[str]:
            return frozenset(i for i in ids if any(under(i, prefix) for prefix in wanted))

        return Passing(part(self.upstream), part(self.here))


def under(nodeid: str, prefix: str) -> bool:
    """Whether test `nodeid` is selected by `prefix`, a folder, file or id without `tests/`."""
    path = nodeid.removeprefix("tests/")
    rest = path.removeprefix(prefix.rstrip("/"))
    return path != rest and (not rest or rest[0] in "/:[")


def read_passing(path: Path) -> Passing:
    """The file's content; UserError with the line that cannot be read."""
    upstream, here = set(), set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line or line.startswith("#"):
            continue
        marks, _, nodeid = line.partition(" ")
        if marks not in MARKS or not nodeid:
            raise UserError(
                f"{path}:{number}: {line!r} is not one of {', '.join(MARKS)} and a test id."
            )
        if marks[0] == "u":
            upstream.add(nodeid)
        if marks[1] == "v":
            here.add(nodeid)
    return Passing(frozenset(upstream), frozenset(here))


def add_passed(path: Path, passed: Iterable[str]) -> int:
    """Mark the tests `passed` in the file at `path`; returns how many are new."""
    before = read_passing(path)
    here = before.here.union(passed)
    lines = [
        f"{'u' if nodeid in before.upstream else '-'}{'v' if nodeid in here else '-'} {nodeid}\n"
        for nodeid in sorted(before.upstream | here)
    ]
    path.write_text(HEADER + "".join(lines), encoding="utf-8")
    return len(here) - len(before.here)
