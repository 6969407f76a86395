# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity explain ID`: one row of the ledger and, step by step, how its status came about."""

from __future__ import annotations

import datetime as dt

from vllmx.config import RunConfig
from vllmx.exceptions import UserError

from . import features
from .checkout import Checkout
from .ledger import as_json
from .status import RANK, CellStatus, FeatureStatus

SHOWN = 12
"""Cells of one status that are spelt out."""
CODES = {"RED": 1, "SUSPECT": 1, "BLOCKED": 3, "GREEN": 0, "DRIFT": 0, "YELLOW": 0}


def run(config: RunConfig) -> int:
    """0: green, drifting or yellow; 1: red or suspect; 3: blocked; 2: anything else."""
    if config.parity.select is None:
        raise UserError("vllmx parity explain needs the id of a row: vllmx parity explain kv.specs")
    checkout = Checkout()
    feature = features.named(checkout.declared, config.parity.select)
    rows = checkout.narrowed([feature.id]).statuses(dt.datetime.now(dt.UTC))
    row = next(row for row in rows if row.feature.id == feature.id)
    print(explain(row))
    return CODES.get(row.status, 2)


def explain(row: FeatureStatus) -> str:
    """The row in words."""
    feature, data = row.feature, as_json(row)
    lines = [
        f"{feature.id} ({feature.tier}): {row.status}",
        f"  {row.reason}",
        f"  what: {feature.title}",
        f"  upstream: {feature.upstream}",
        f"  ours: {', '.join(feature.ours) or 'nothing'}",
    ]
    lines += [f"  not built: {part}" for part in feature.lacks]
    cells = ", ".join(f"{number} {name}" for name, number in data["cells"].items())
    lines.append(f"  cells: {len(row.cells)} ({cells or 'none'}); the worst one decides")
    if data["goldens"]:
        lines.append(f"  goldens: {len(data['goldens'])}; providers {', '.join(data['providers'])}")
        lines.append(f"  recorded by: {', '.join(data['oracles']) or 'no run has told'}")
    if row.proven:
        lines.append(f"  last shown: {row.proven} on {', '.join(data['devices'])}")
    if row.headrooms:
        smallest, median = row.headrooms
        lines.append(f"  limit / measured: at least {smallest:.2f}, median {median:.2f}")
    if planted := data["mutants"]:
        lines.append(f"  planted faults found: {planted['killed']} of {planted['required']}")
    ordered = sorted(row.cells, key=lambda cell: -RANK[cell.status])
    seen: dict[str, int] = {}
    for cell in ordered:
        seen[cell.status] = seen.get(cell.status, 0) + 1
        if seen[cell.status] <= SHOWN:
            lines += _cell(cell)
    hidden = {name: number - SHOWN for name, number in seen.items() if number > SHOWN}
    lines += [f"  and {number} more {name}" for name, number in hidden.items()]
    return "\n".join(lines)


def _cell(cell: CellStatus) -> list[str]:
    lines = [f"  {cell.cell.name}"]
    lines += [f"    {number}. {step}" for number, step in enumerate(cell.steps, 1)]
    if cell.row is not None:
        lines.append(f"    evidence {cell.row['id'][:16]} of {cell.row['ts']}")
    if cell.status != "GREEN" and cell.cell.command:
        lines.append(f"    run: {cell.cell.command}")
    return lines
