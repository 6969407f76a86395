# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity ledger`: a row a feature, with its status, why, and what shows it.

Plain, it prints every row and writes ledger.md and ledger.jsonl into reports/. `--json` prints one
JSON object a row instead. `--check` writes nothing and fails if the written files are not what the
evidence gives today's code. What is written speaks of the time of the newest evidence, so it is
the same on any day; what is printed speaks of now, when evidence may have become too old.
"""

from __future__ import annotations

import datetime as dt
import json
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig

from . import comparison, evidence_index, features
from .checkout import Checkout
from .features import CANARY
from .status import STATUSES, CellStatus, FeatureStatus

TIERS = ("T0", "T1", "T2", "T3")


def run(config: RunConfig) -> int:
    """0: rendered, or fresh; 1: a written file is stale; 2: the ledger can't be believed."""
    options = config.parity
    folder = Path(options.output_dir) if options.output_dir else None
    checkout = Checkout()
    if options.check:
        return check(checkout, folder)
    chosen = {f.id for f in features.selected(checkout.declared, options.select, options.tier)}
    part = options.select is not None or options.tier is not None
    if part:
        checkout.narrowed(chosen)
    rows = checkout.statuses(dt.datetime.now(dt.UTC))
    shown = [row for row in rows if row.feature.id in chosen]
    print("\n".join(json.dumps(as_json(row)) for row in shown) if options.json else listing(shown))
    if not part and not options.json:
        write(checkout, folder)
    for trouble in (found := troubles(checkout, rows)):
        print(f"INVALID: {trouble}", file=sys.stderr)
    return 2 if found else 0


def troubles(checkout: Checkout, rows: Sequence[FeatureStatus]) -> list[str]:
    """Why no row can be believed; empty if they can."""
    found = [f"golden {n}: {g.problem}" for n, g in checkout.goldens.items() if g.problem]
    canary = [row for row in rows if row.feature.id == CANARY]
    if not canary:
        found.append(f"there is no canary row {CANARY}")
    elif canary[0].status != "RED":
        found.append(f"the canary is {canary[0].status} ({canary[0].reason}); it must be RED")
    elif others := comparison.changed(looked_at_with(canary[0]), checkout.root):
        found.append(
            f"the canary was last looked at with another comparison ({', '.join(others)}); "
            f"`vllmx parity collect {CANARY}` looks again"
        )
    if gone := evidence_index.removed(checkout.root):
        found.append(f"evidence was removed or changed by commits: {', '.join(gone[:5])}")
    return found


def looked_at_with(canary: FeatureStatus) -> dict[str, str]:
    """The sums of the comparison (comparison.py) that the canary's row is of."""
    (row,) = (cell.row for cell in canary.cells)
    return dict((row or {}).get("details", {}).get("comparison", {}))


# ---- rows


def as_json(row: FeatureStatus) -> dict[str, Any]:
    """A row as plain data."""
    feature = row.feature
    killed, mutants = row.kills
    graded = [cell for cell in row.cells if cell.cell.golden]
    return {
        "id": feature.id,
        "tier": feature.tier,
        "status": row.status,
        "reason": row.reason,
        "evidence": [sha[:16] for sha in row.evidence],
        "feature": feature.title,
        "upstream": feature.upstream,
        "ours": list(feature.ours),
        "lacks": list(feature.lacks),
        "cells": {name: row.counts[name] for name in STATUSES if row.counts[name]},
        "beside": by_place(row.beside),
        "providers": sorted({cell.cell.provider for cell in graded}),
        "devices": sorted({cell.cell.device for cell in row.cells if cell.row is not None}),
        "goldens": sorted({cell.cell.golden for cell in graded}),
        "oracles": oracles_of(graded),
        "proven": row.proven,
        "headroom": [round(value, 3) for value in row.headrooms] if row.headrooms else None,
        "mutants": {"killed": killed, "required": mutants} if mutants else None,
        "lost": row.lost,
        "canary": feature.id == CANARY,
    }


def by_place(cells: Iterable[CellStatus]) -> dict[str, dict[str, Any]]:
    """ "provider on device" -> its cells, those whose last run passed, and the number by status."""
    found: dict[str, list[CellStatus]] = defaultdict(list)
    for cell in cells:
        found[f"{cell.cell.provider} on {cell.cell.device}"].append(cell)
    return {
        place: {
            "cells": len(listed),
            "passed": sum(c.row is not None and c.row["verdict"] == "pass" for c in listed),
            "statuses": dict(Counter(cell.status for cell in listed)),
        }
        for place, listed in sorted(found.items())
    }


def share(counts: Mapping[str, Any]) -> str:
    """`131/131, STALE`: of an entry of `by_place` the cells whose last run passed, of all, and the
    worst status unless that is GREEN."""
    name = worst(counts["statuses"])
    return f"{counts['passed']}/{counts['cells']}" + ("" if name == "GREEN" else f", {name}")


def worst(counts: Iterable[str]) -> str:
    """The worst of some statuses."""
    return max(counts, key=STATUSES.index)


def places(found: Mapping[str, Mapping[str, Any]]) -> str:
    """`triton on cuda 131/131, STALE; ...`"""
    return "; ".join(f"{place} {share(counts)}" for place, counts in found.items())


def short(text: str, most: int) -> str:
    """At most `most` characters of a text, cut between words; `…` stands for the rest."""
    return textwrap.shorten(text, most, placeholder=" …")


def oracles_of(cells: Iterable[CellStatus]) -> list[str]:
    """Which oracles recorded the goldens that `cells` were held against, and what of them."""
    told = (cell.row["oracle"] for cell in cells if cell.row is not None)
    return sorted({f"{oracle['name']}: {oracle['lane']}" for oracle in told if oracle.get("name")})


def totals(rows: Iterable[FeatureStatus]) -> tuple[Counter[str], Counter[tuple[str, str]]]:
    """(rows by status, rows by tier and status), the canary aside."""
    plain = [row for row in rows if row.feature.id != CANARY]
    by_status = Counter(row.status for row in plain)
    return by_status, Counter((row.feature.tier, row.status) for row in plain)


def equation(rows: Sequence[FeatureStatus]) -> str:
    """`156 = 3 GREEN + ...`; an assertion that it holds."""
    by_status, _ = totals(rows)
    number = sum(row.feature.id != CANARY for row in rows)
    assert by_status.total() == number, (by_status, number)
    parts = [f"{by_status[name]} {name}" for name in STATUSES if by_status[name]]
    return f"{number} = " + (" + ".join(parts) or "0")


def listing(rows: Sequence[FeatureStatus]) -> str:
    """A line a row, and the totals."""
    width = max(len(row.feature.id) for row in rows)
    lines = [
        f"{row.feature.id:<{width}} {row.feature.tier} {row.status:<8} {row.reason}"[:200]
        for row in rows
    ]
    extra = " and the canary" if any(row.feature.id == CANARY for row in rows) else ""
    return "\n".join([*lines, f"{equation(rows)}{extra}"])


# ---- files


def render(rows: Sequence[FeatureStatus], as_of: dt.datetime) -> dict[str, str]:
    """Name -> text of the files that are written."""
    lines = [json.dumps(as_json(row), sort_keys=True) for row in rows]
    return {"ledger.jsonl": "\n".join(lines) + "\n", "ledger.md": markdown(rows, as_of)}


def markdown(rows: Sequence[FeatureStatus], as_of: dt.datetime) -> str:
    """The ledger as a page."""
    _, by_tier = totals(rows)
    used = [name for name in STATUSES if any(by_tier[tier, name] for tier in TIERS)]
    lines = [
        "# Ledger",
        "",
        "Written by `vllmx parity ledger` from parity/evidence; never edit it. A row's status is",
        "computed (parity/status.py); `vllmx parity explain ID` says how. The canary is a planted",
        "fault and must be RED. Beside are cells that no row asks for, such as those of a GPU, and",
        "count when they are bad: how many passed when last run, of how many, the worst status.",
        f"As of {as_of:%Y-%m-%d %H:%M} UTC, when evidence was last added.",
        "",
        equation(rows),
        "",
        "| tier | rows | " + " | ".join(used) + " |",
        "|---" * (len(used) + 2) + "|",
    ]
    for tier in TIERS:
        numbers = [by_tier[tier, name] for name in used]
        cells = " | ".join(str(number or "") for number in numbers)
        lines.append(f"| {tier} | {sum(numbers)} | {cells} |")
    lines += [
        "",
        "| id | tier | status | reason | cells | beside | last shown | ours | upstream |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(_line(row) for row in rows)]) + "\n"


def _line(row: FeatureStatus) -> str:
    feature = row.feature
    green = row.counts["GREEN"]
    shown = [
        *(feature.id, feature.tier, row.status, short(row.reason, 160)),
        *(f"{green}/{len(row.cells)}" if row.cells else "", places(by_place(row.beside))),
        row.proven[:10],
        *(", ".join(feature.ours), feature.upstream),
    ]
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in shown) + " |"


def write(checkout: Checkout, folder: Path | None = None) -> list[Path]:
    """Write the files into `folder` (None: reports/)."""
    folder = folder or checkout.root / "reports"
    folder.mkdir(parents=True, exist_ok=True)
    as_of = checkout.as_of()
    paths = []
    for name, text in render(checkout.statuses(as_of), as_of).items():
        paths.append(folder / name)
        paths[-1].write_text(text, encoding="utf-8")
    return paths


def check(checkout: Checkout, folder: Path | None = None) -> int:
    """0 if the written files are what would be written now, else 1; 2 if none can be believed."""
    folder = folder or checkout.root / "reports"
    as_of = checkout.as_of()
    rows = checkout.statuses(as_of)
    stale = stale_files(folder, render(rows, as_of))
    for name, words in stale.items():
        print(f"stale: {folder / name}: {words}; `vllmx parity ledger` writes it anew")
    if missing := evidence_index.unlisted(checkout.evidence_folder):
        stale[evidence_index.INDEX] = f"it lacks {missing[0]}"
        print(f"stale: {evidence_index.INDEX} lacks {', '.join(missing)}; the next run lists them")
    for trouble in (found := troubles(checkout, rows)):
        print(f"INVALID: {trouble}", file=sys.stderr)
    if not stale and not found:
        print(f"fresh: {equation(rows)}")
    return 2 if found else int(bool(stale))


def stale_files(folder: Path, texts: dict[str, str]) -> dict[str, str]:
    """Name -> in which line a file of `folder` is not `texts`; those that are equal left out."""
    found = {}
    for name, text in texts.items():
        path = folder / name
        if not path.is_file():
            found[name] = "missing"
            continue
        pairs = zip(path.read_text(encoding="utf-8").splitlines(), text.splitlines())
        differing = next((i for i, (a, b) in enumerate(pairs, 1) if a != b), None)
        if differing is not None:
            found[name] = f"line {differing} is another now"
        elif path.read_text(encoding="utf-8") != text:
            found[name] = "its length is another now"
    return found
