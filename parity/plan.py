# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity plan`: the least that has to be run so that everything is shown again."""

from __future__ import annotations

import datetime as dt
import json
from collections import Counter
from collections.abc import Iterable

from vllmx.config import RunConfig

from . import features
from .checkout import Checkout
from .features import CANARY
from .status import SHOWN, FeatureStatus

JOINED = (
    "vllmx parity collect device=cuda --select ",
    *("vllmx parity replay ", "vllmx parity collect "),
    "vllmx parity upstream-tests --select ",
)
"""Commands that take many selections, separated by commas, in one run; the longer ones first."""


def run(config: RunConfig) -> int:
    """0: nothing to run; 1: the printed commands are to be run."""
    options = config.parity
    checkout = Checkout()
    chosen = {f.id for f in features.selected(checkout.declared, options.select, options.tier)}
    todo, reasons = plan(checkout.narrowed(chosen).statuses(dt.datetime.now(dt.UTC)))
    if options.json:
        print(json.dumps({"commands": todo, "cells": dict(reasons)}))
    else:
        words = ", ".join(f"{number} {name}" for name, number in reasons.most_common())
        print(f"{reasons.total()} cells to show: {words or 'none'}")
        print("\n".join(todo))
    return int(bool(todo))


def plan(rows: Iterable[FeatureStatus]) -> tuple[list[str], Counter[str]]:
    """(commands, cells to be shown by status) of the rows that are built, the canary aside."""
    commands: dict[str, None] = {}
    reasons: Counter[str] = Counter()
    counted = set()
    for row in rows:
        if row.status == "MISSING" or row.feature.id == CANARY:
            continue
        for cell in row.cells:
            if cell.status in SHOWN or cell.cell.key in counted:
                continue
            counted.add(cell.cell.key)
            reasons[cell.status] += 1
            if cell.cell.command:
                commands[cell.cell.command] = None
    return join(commands), reasons


def join(commands: Iterable[str]) -> list[str]:
    """`commands` with those that take several selections put together."""
    listed = list(commands)
    result = [c for c in listed if not c.startswith(JOINED)]
    starts = [next((start for start in JOINED if c.startswith(start)), None) for c in listed]
    for start in JOINED:
        parts = [c.removeprefix(start) for c, mine in zip(listed, starts) if mine == start]
        flag = "" if start.endswith("--select ") or len(parts) == 1 else "--select "
        if parts:
            result.append(f"{start}{flag}{','.join(parts)}")
    return result
