# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity replay [select=op.NAME|model.NAME|text.KIND] [provider=...]`: ours and the goldens.

All cells are listed first and all are run, whatever fails; each gives a row of evidence. What
`minutes=` leaves undone has none: it is missing. Exit code 0: all passed; 1: some failed; 2: a
golden is missing or damaged, nothing was selected, or time ran out; 3: some could not run here, or
none of those selected could.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TypeVar

import torch

from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import evidence, golden
from .evidence import Row
from .op_cells import GPU_LANE, OpCell, expected, expected_of_gpu_lane, ops_without_cases
from .op_replay import Lane
from .selection import by_kind, check_words, golden_names

EXIT = {"pass": 0, "fail": 1, "error": 1, "invalid": 2, "skip": 3}
WORST_FIRST = ("fail", "error", "invalid", "skip", "pass")
T = TypeVar("T")


@dataclass
class TimeBox:
    """Hands out groups of cells until `deadline`, of time.monotonic; counts those it leaves."""

    deadline: float = math.inf
    left: int = 0

    def take(self, groups: Iterable[Sequence[T]]) -> Iterator[Sequence[T]]:
        """Each group, for as long as there is time."""
        for group in groups:
            if time.monotonic() < self.deadline:
                yield group
            else:
                self.left += len(group)


def exit_code(rows: Sequence[Row]) -> int:
    """The exit code of a run; no rows at all are invalid."""
    verdicts = {row["verdict"] for row in rows}
    return next((EXIT[verdict] for verdict in WORST_FIRST if verdict in verdicts), 2)


def replay_ops(
    device: str = "cpu",
    select: str | None = None,
    provider: str | None = None,
    folder: Path = golden.OPS,
    box: TimeBox | None = None,
) -> tuple[list[Row], list[OpCell]]:
    """(a row for every cell that `box` has time for, the cells that a provider declares it does not
    take)."""
    box = box or TimeBox()
    cells = expected(device, select, provider)
    lane = Lane(device, folder)
    lane.prepare(cells)
    rows = [lane.row(c) for (c,) in box.take([c] for c in cells if not c.refused)]
    if select is None and provider is None:
        known = {cell.golden for cell in cells}
        rows += [lane.stray(name) for name in golden.strays(folder, known)]
        rows += [lane.uncovered(op) for op in ops_without_cases()]
    if device == "cuda" and folder == golden.OPS:
        twin = Lane(device, golden.OPS_GPU, GPU_LANE)
        again = [c for c in expected_of_gpu_lane(select, provider) if not c.refused]
        rows += [twin.row(c) for (c,) in box.take([c] for c in again)]
    return rows, [cell for cell in cells if cell.refused]


def replay_models(
    device: str = "cpu",
    select: str | None = None,
    provider: str | None = None,
    box: TimeBox | None = None,
) -> list[Row]:
    """A row for every model, provider and mode; `box` has time for a model or it hasn't."""
    from .model_replay import ModelLane
    from .model_table import expected as models

    box = box or TimeBox()
    lane = ModelLane(device)
    by_model = groupby(models(select, provider, device), lambda cell: cell.feature)
    groups = box.take([*cells] for _, cells in by_model)
    return [row for group in groups for row in lane.rows(group)]


def replay_texts(select: str | None = None, provider: str | None = None) -> list[Row]:
    """A row for every spec of texts; they have one provider."""
    from .text_replay import PROVIDER, replay

    return replay(select) if provider in (None, PROVIDER) else []


def summary(rows: Sequence[Row], refused: Sequence[OpCell], seconds: float) -> str:
    """What a run came to: every row that did not pass, then totals that add up."""
    lines = [
        f"{row['verdict']:7} {row['feature']} {row['case']} {row['provider']}: {row['reason']}"
        for row in sorted(rows, key=lambda row: WORST_FIRST.index(row["verdict"]))
        if row["verdict"] != "pass"
    ]
    counts = Counter(row["verdict"] for row in rows)
    parts = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(WORST_FIRST))
    features = len({row["feature"] for row in rows})
    lines.append(f"{len(rows)} cells of {features} ops, models and texts: {parts}; {seconds:.0f} s")
    for reason, count in Counter((c.provider, c.refused) for c in refused).items():
        lines.append(f"not asked: {count} cells of {reason[0]}: {reason[1]}")
    return "\n".join(lines)


def check_cases(device: str, select: str) -> None:
    """UserError for a word of `select` that names no golden, or a case that there is not."""
    from .text_cases import selected

    # Names first, not the cells of `expected`: that builds the inputs of every case.
    check_words(select, golden_names())
    for word in (part.strip() for part in select.split(",")):
        if word.startswith("model.") or "/" not in word:
            continue
        if not (expected(device, word) or selected(word)):
            raise no_cell(device, word, None)


def no_cell(device: str, select: str | None, provider: str | None) -> UserError:
    """What is wrong with words that each name a golden and together select none."""
    from .model_table import PROVIDERS as MODEL_PROVIDERS
    from .text_replay import PROVIDER as TEXT_PROVIDER

    if provider is None:
        return UserError(f"parity.select={select}: no case is called so.")
    known = {cell.provider for cell in expected(device)} | {*MODEL_PROVIDERS, TEXT_PROVIDER}
    hint = "" if provider in known else did_you_mean(provider, known)
    return UserError(
        f"parity.provider={provider}: nothing of what is selected has it; "
        f"the providers are {', '.join(sorted(known))}.{hint}"
    )


def device_of(config: RunConfig) -> str | None:
    """The device that cells run on, a GPU where there is one; None, and why, where it is absent."""
    device = config.device.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no cuda device here")
        return None
    return device


def run(config: RunConfig) -> int:
    """The verb."""
    device = device_of(config)
    if device is None:
        return 3
    started = time.monotonic()
    box = TimeBox(started + 60 * config.parity.minutes)
    select, provider = config.parity.select, config.parity.provider
    if select is not None:
        check_cases(device, select)
    rows: list[Row] = []
    refused: list[OpCell] = []
    for kind, words in by_kind(select, ("ops", "text", "models")).items():
        if kind == "ops":
            ops, refused = replay_ops(device, words, provider, box=box)
            rows += ops
        elif kind == "text":
            rows += replay_texts(words, provider)
        elif kind == "models":
            rows += replay_models(device, words, provider, box)
    if not rows and refused:
        print(summary(rows, refused, time.monotonic() - started))
        return 3
    if not rows and not box.left:
        raise no_cell(device, select, provider)
    output = config.parity.output_dir
    folder = Path(output) if output else evidence.EVIDENCE
    path = evidence.append(rows, folder) if rows else "none"
    if config.parity.json:
        for row in rows:
            print(json.dumps(row, sort_keys=True))
    else:
        print(summary(rows, refused, time.monotonic() - started))
        print(f"evidence: {path}")
        if rows and rows[0]["run"]["dirty"]:
            print(evidence.DIRTY)
    code = exit_code(rows)
    if box.left:
        print(f"{box.left} cells are missing: time ran out after {config.parity.minutes:g} minutes")
        return code if code == 1 else 2
    return code
