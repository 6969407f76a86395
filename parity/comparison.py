# SPDX-License-Identifier: Apache-2.0
"""The comparison that the canary guards, in sums: whether it is the one that the canary was last
looked at with.

The canary's own closure holds nothing of this, so that no change here hides that it was found no
more. But that it was found once says nothing of a comparison that has been changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import policy
from .closure import Sources, path_of

PARTS = (
    "parity/calibrate.py:Floors",
    "parity/compare.py",
    "parity/floor_cap.py",
    "parity/op_replay.py",
    "parity/truths.py:contradiction",
)
"""Files and symbols, each by its own text: all that stands between a planted fault and its row."""
LIMITS = "parity/policy.yaml"


def sums(root: Path) -> dict[str, str]:
    """Part -> sha256 of its code, or of the limits; empty where there is none."""
    sources, found = Sources(root), {}
    for part in PARTS:
        path = path_of(part)
        there = (root / path).is_file() and (
            part == path or part.partition(":")[2] in sources.module(path).defined
        )
        found[part] = sources.looked_at(part)[0] if there else ""
    return {**found, LIMITS: policy.load(root / LIMITS).sha256}


def changed(then: Mapping[str, str], root: Path) -> list[str]:
    """The parts that are not what `then`, the sums of an earlier time, says of them."""
    now = sums(root)
    return [part for part in sorted({*now, *then}) if now.get(part) != then.get(part)]
