# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity calibrate [select=...] [check=true]`: how far the oracle is from itself.

An oracle answers an op in several lanes: the one that made the golden, and its other kernels for
the same op. What those are off by, against the truth, is the floor under every limit. Floors lie
beside the goldens, in floors.json, as golden bytes hold what the oracle said and nothing else. A
golden without an entry has an unknown floor, and what is shown with it is unproven.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig

from .compare import Floor, floor_of, worst_of
from .digests import canonical
from .dtypes import Array
from .golden import OPS as FOLDER
from .golden import GoldenError
from .truths import truth_of

FLOORS = "floors.json"
SCHEMA = 1
DIGITS = 4


def measure(
    op: str, arguments: Mapping[str, Any], lanes: Mapping[str, Mapping[str, Array]]
) -> dict[str, dict[str, dict[str, float]]]:
    """Lane -> output -> figures of a Floor, rounded so that they don't differ from run to run."""
    truth = truth_of(op, arguments)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for lane, outputs in sorted(lanes.items()):
        found[lane] = {}
        for name, value in outputs.items():
            if truth is None or not value.is_float or value.shape != truth[name].shape:
                continue
            figures = asdict(floor_of(value, truth[name]))
            found[lane][name] = {k: float(f"{v:.{DIGITS}g}") for k, v in figures.items()}
    return found


def write(entries: Mapping[str, Any], folder: Path = FOLDER) -> None:
    """Replace the floors of the goldens named in `entries`; drop those of goldens that are gone."""
    floors = {**_read(folder), **entries}
    kept = {name: floors[name] for name in sorted(floors) if (folder / name).is_file()}
    lines = ",\n".join(f"{json.dumps(name)}:{canonical(kept[name]).decode()}" for name in kept)
    (folder / FLOORS).write_text(f'{{"schema":{SCHEMA},"floors":{{\n{lines}\n}}}}\n')


class Floors:
    """The floors of a folder of goldens."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.entries = _read(folder)

    def known(self, golden: str, golden_sha: str) -> bool:
        """Whether the noise was measured of this golden, and not of one that was there before."""
        entry = self.entries.get(golden, {})
        return entry.get("golden_sha") == golden_sha and bool(entry.get("repeat"))

    def sha(self, golden: str) -> str:
        """sha256 of what other lanes of a golden are off by; empty where there are none."""
        lanes = self.entries.get(golden, {}).get("lanes")
        return hashlib.sha256(canonical(lanes)).hexdigest() if lanes else ""

    def of(self, golden: str, golden_sha: str, output: str) -> Floor | None:
        """The floor of an output; None where it was never measured, or of another golden."""
        if not self.known(golden, golden_sha):
            return None
        lanes = self.entries[golden]["lanes"].values()
        return worst_of([Floor(**outputs[output]) for outputs in lanes if output in outputs])


def run(config: RunConfig) -> int:
    """Ask the oracles again and write the floors of the goldens that there are; with `check` none
    is written, and it is 1 if any would be another, or is of a golden that is gone."""
    from .record import ask_all, oracles
    from .selection import check_oracle, check_words, op_names

    options = config.parity
    if options.oracle is not None:
        check_oracle(options.oracle, oracles())
    if options.select is not None:
        check_words(options.select, op_names())
    answers = ask_all(options.select, options.oracle)
    entries = {
        answer.golden: answer.floor()
        for answer in answers.answers
        if (FOLDER / answer.golden).is_file() and not answer.fault(FOLDER)
    }
    known = Floors(FOLDER).entries
    changed = sum(entries[name] != known.get(name) for name in entries)
    changed += sum(not (FOLDER / name).is_file() for name in known)
    if entries and not options.check:
        write(entries, FOLDER)
    for reason in answers.reasons:
        print(reason)
    print(f"{len(entries)} floors measured, {changed} changed")
    if answers.reasons or not entries:
        return 3 if answers.blocked else 2
    return 1 if options.check and changed else 0


def _read(folder: Path) -> dict[str, Any]:
    path = folder / FLOORS
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text())["floors"])
    except (ValueError, KeyError, TypeError) as error:
        raise GoldenError(f"{path.name} is damaged: {error}") from error
