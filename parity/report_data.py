# SPDX-License-Identifier: Apache-2.0
"""What a report says, as plain data; the pages are made of nothing else.

It is a function of the checkout: the evidence, the goldens and the code. Where nothing is known
a section is empty, and the pages say `no data`, never 0 %.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .budget import ALLOWED, TOTAL, usage
from .census import DRIFT, PINNED
from .checkout import Checkout
from .drift import anchors
from .features import CANARY
from .ledger import TIERS, as_json, by_place, equation, totals, troubles
from .ledger import worst as worst_status
from .mutant_detectors import Detectors
from .mutate import CATALOGUE, WANTED, catalogue, closure_of
from .plan import join
from .report_lanes import earlier, lanes
from .status import STATUSES, Cell, CellStatus, FeatureStatus, by_key, judge

SPELT = 200
"""Red cells that are spelt out."""
VERSIONS = ("machine", "python", "torch", "triton", "numpy")
OF_ROW = ("id", "tier", "status", "reason", "cells", "beside", "proven", "headroom", "canary")
"""What the report tells of a row; ledger.jsonl has all of it."""
AGAIN = ("STALE", "BLOCKED", "UNPROVEN")
"""Statuses of cells that are to be run."""
OTHER_LANE = "the oracle's other lane"
FIGURES = ("mean", "p99", "kl", "flips", "ties")
"""Checks of a model by the last part of their name, of which the largest of a run is told."""


def build(checkout: Checkout, now: dt.datetime, reports: Path | None = None) -> dict[str, Any]:
    """The whole report at the time `now`; `reports` has those that were written before."""
    reports = reports or checkout.root / "reports"
    rows = checkout.statuses(now)
    by_status, by_tier = totals(rows)
    cells = [cell for row in rows if row.feature.id != CANARY for cell in row.cells]
    asked = {cell.cell.key: cell for cell in cells}
    unique = list(asked.values())
    other = {cell.cell.key: cell for row in rows for cell in row.beside}
    beside = [cell for key, cell in other.items() if key not in asked]
    red = [cell for cell in unique if cell.status in ("RED", "SUSPECT")]
    again = [cell for cell in unique if cell.status in AGAIN]
    return {
        "as_of": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "trouble": troubles(checkout, rows),
        "canary": next((r.status for r in rows if r.feature.id == CANARY), "none"),
        "equation": equation(rows),
        "statuses": {name: by_status[name] for name in STATUSES},
        "tiers": {tier: {s: by_tier[tier, s] for s in STATUSES} for tier in TIERS},
        "areas": areas(rows),
        "cells": {name: sum(c.status == name for c in unique) for name in STATUSES},
        "beside": by_place(beside),
        "evidence": evidence_counts(checkout),
        "red": [told(cell) for cell in red[:SPELT]],
        "more_red": len(red[SPELT:]),
        "stale": stale(again),
        "commands": commands(again),
        "headroom": headroom(unique),
        "providers": providers([*unique, *beside]),
        "models": models(unique, beside),
        "mutation": mutation(checkout, now),
        "goldens": golden_sizes(checkout.goldens_folder),
        "upstream": upstream(checkout.root),
        "lanes": lanes(checkout.goldens_folder),
        "trend": earlier(reports, f"{now:%Y-%m-%dT%H:%M:%SZ}"),
        "environment": environment(checkout.evidence),
        "rows": [{key: facts[key] for key in OF_ROW} for facts in map(as_json, rows)],
    }


def areas(rows: Iterable[FeatureStatus]) -> dict[str, dict[str, int]]:
    """Area (the first word of an id) -> status -> rows."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        if row.feature.id != CANARY:
            found[row.feature.id.split(".")[0]][row.status] += 1
    return {area: dict(found[area]) for area in sorted(found)}


def evidence_counts(checkout: Checkout) -> dict[str, Any]:
    """Rows of evidence by verdict, files, and how many are of a tree with uncommitted changes."""
    rows = checkout.evidence
    files = sorted(path.name for path in checkout.evidence_folder.glob("*.jsonl"))
    return {
        "rows": len(rows),
        "verdicts": dict(sorted(Counter(row["verdict"] for row in rows).items())),
        "dirty": sum(bool(row["run"].get("dirty", True)) for row in rows),
        "files": len(files),
    }


def told(cell: CellStatus) -> dict[str, Any]:
    """A cell with its first broken limit and the command that shows it."""
    broken = next(
        (
            {"name": name, "measured": check["measured"], "limit": check["limit"]}
            for name, check in (cell.row["checks"] if cell.row else {}).items()
            if "limit" in check and check["measured"] > check["limit"]
        ),
        None,
    )
    return {
        "cell": cell.cell.name,
        "status": cell.status,
        "reason": cell.reason,
        "broken": broken,
        "worst": worst(cell),
        "evidence": cell.row["id"][:16] if cell.row else "",
        "command": cell.cell.command,
    }


def worst(cell: CellStatus) -> str:
    """Where the row of a cell is farthest off, and what stands there; empty if it doesn't say."""
    found = (cell.row.get("details", {}) if cell.row else {}).get("worst", {})
    return "; ".join(
        f"{name}[{', '.join(map(str, place['at']))}] is {place['ours']}, "
        + ", ".join(f"{who} {place[who]}" for who in ("golden", "truth") if who in place)
        if "at" in place
        else f"{name}: sequence {place['sequence']}, place {place['place']}: {place['off']}"
        for name, place in sorted(found.items())
    )


def stale(cells: Iterable[CellStatus]) -> list[dict[str, Any]]:
    """What has to be run again: a line a cause and verb, with how many cells it is about."""
    found: dict[tuple[str, str, str], list[CellStatus]] = defaultdict(list)
    for cell in cells:
        cause = cell.reason.split(" since ")[0]
        verb = " ".join(cell.cell.command.split()[:3])
        found[cell.status, cause, verb].append(cell)
    listed = sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]), item[0]))
    return [
        {
            "status": status,
            "cause": cause,
            "commands": commands(told),
            "cells": len(told),
            "of": dict(sorted(Counter(c.cell.feature for c in told).items())),
        }
        for (status, cause, _), told in listed
    ]


def commands(cells: Iterable[CellStatus]) -> list[str]:
    """The fewest commands that run `cells`."""
    return join(dict.fromkeys(c.cell.command for c in cells if c.cell.command))


def headroom(cells: Iterable[CellStatus]) -> dict[str, Any]:
    """limit / measured of every graded cell, the ten nearest to their limit, the ten farthest."""
    found = sorted(
        (value, cell.cell.name, worst(cell))
        for cell in cells
        if (value := cell.headroom) is not None
    )
    pairs = [[round(value, 3), name, place] for value, name, place in found]
    return {
        "values": [value for value, *_ in pairs],
        "tightest": pairs[:10],
        "loosest": pairs[-10:][::-1] if len(pairs) > 10 else [],
    }


def providers(cells: Iterable[CellStatus]) -> dict[str, dict[str, Any]]:
    """Op -> its cells by place, those that nothing asks for among them (ledger.by_place)."""
    found: dict[str, list[CellStatus]] = defaultdict(list)
    for cell in cells:
        if cell.cell.kind == "op":
            found[cell.cell.feature].append(cell)
    return {op: by_place(found[op]) for op in sorted(found)}


def models(asked: Iterable[CellStatus], beside: Iterable[CellStatus]) -> dict[str, dict[str, Any]]:
    """Model -> how its cells stand, by place and one by one, and its error by layer.

    asked: cells that rows ask for; beside: those of other devices, which are counted alone.
    tightest: the run nearest to a limit; None where no run counts. layer: the first one whose
    stream is out of line; empty if none is. layers: run -> errors of the stream after each layer,
    the last of them those of the oracle's other lane; empty where none was measured.
    """
    ours: dict[str, list[CellStatus]] = defaultdict(list)
    others: dict[str, list[CellStatus]] = defaultdict(list)
    for found, cells in ((ours, asked), (others, beside)):
        for cell in cells:
            if cell.cell.kind == "model":
                found[cell.cell.feature].append(cell)
    return {name: _model(ours[name], others[name]) for name in sorted(ours)}


def _model(asked: list[CellStatus], beside: list[CellStatus]) -> dict[str, Any]:
    runs = sorted((_run(cell) for cell in asked), key=lambda run: run["run"])
    layers, floors, off = {}, [], []
    for cell in asked:
        details = cell.row.get("details", {}) if cell.row else {}
        if details.get("layers"):
            layers[_name(cell)] = details["layers"]
            floors = details.get("floor_layers", floors)
        if words := details.get("drift"):
            number = re.search(r"\d+", words)
            off.append((int(number[0]) if number else 0, f"{words} ({_name(cell)})"))
    return {
        "status": worst_status(cell.status for cell in asked),
        "places": by_place([*asked, *beside]),
        "tightest": min(
            (run for run in runs if run["headroom"] is not None),
            key=lambda run: run["headroom"],
            default=None,
        ),
        "layer": min(off)[1] if off else "",
        "layers": {**layers, OTHER_LANE: floors} if layers else {},
        "runs": runs,
    }


def _name(cell: CellStatus) -> str:
    """A run of a model, such as `auto bs1 cpu`."""
    return f"{cell.cell.provider} {cell.cell.mode} {cell.cell.device}"


def _run(cell: CellStatus) -> dict[str, Any]:
    """A cell of a model, its tightest check, and its figures."""
    checks = cell.row["checks"] if cell.row else {}
    name = min(
        (name for name, check in checks.items() if "headroom" in check),
        key=lambda name: checks[name]["headroom"],
        default="",
    )
    figures = {
        figure: max(found)
        for figure in FIGURES
        if (found := [c["measured"] for n, c in checks.items() if n.rpartition(".")[2] == figure])
    }
    return {
        "run": _name(cell),
        "status": cell.status,
        "ts": cell.row["ts"] if cell.row else "",
        "check": name,
        "measured": checks[name]["measured"] if name else None,
        "limit": checks[name]["limit"] if name else None,
        "headroom": round(checks[name]["headroom"], 3) if name else None,
        "figures": {figure: float(f"{value:.3g}") for figure, value in figures.items()},
    }


def mutation(checkout: Checkout, now: dt.datetime) -> dict[str, Any]:
    """Every planted fault of the catalogue by category, judged as any other cell: a run of other
    code or of a dirty tree finds nothing. Honest alternates apart.
    """
    path = checkout.parity / CATALOGUE.name
    rows, policy = by_key(checkout.evidence), checkout.policy
    by_category: dict[str, Counter[str]] = defaultdict(Counter)
    honest: Counter[str] = Counter()
    missed = []
    detectors = Detectors(checkout.root)
    for mutant in catalogue(path) if path.is_file() else []:
        mode = "honest" if mutant.honest else "planted"
        cell = Cell(f"mutant.{mutant.name}", mutant.by, "vllmx", "cpu", mode, kind="mutant")
        closure = closure_of(mutant, checkout.root, detectors)
        told = judge(cell, {}, rows[cell.key], closure, policy, policy.age_limit(""), now)
        good, bad = ("accepted", "refused") if mutant.honest else ("found", "missed")
        word = {"GREEN": good, "RED": bad}.get(told.status, told.status.lower())
        (honest if mutant.honest else by_category[mutant.category])[word] += 1
        if told.row is not None and told.status not in ("GREEN", "STALE"):
            missed.append(f"{mutant.name}: {told.reason}")
    words = sum(by_category.values(), Counter[str]())
    return {
        **score(words),
        "honest": dict(sorted(honest.items())),
        "categories": {name: dict(sorted(by_category[name].items())) for name in by_category},
        "missed": sorted(missed),
    }


def score(words: Counter[str]) -> dict[str, Any]:
    """What planted faults, counted by what came of them, add up to.

    total: faults that there are; looked: those that a run speaks of that counts; wanted: the share
    of all that has to be found, and reached: whether it is. What nobody looked at is not found.
    """
    total, found = words.total(), words["found"]
    return {
        "total": total,
        "looked": found + words["missed"],
        "found": found,
        "wanted": WANTED,
        "reached": not total or found / total >= WANTED,
    }


def golden_sizes(folder: Path) -> dict[str, Any]:
    """Bytes of the goldens by folder against their budget."""
    parts = {}
    for used in usage(folder):
        allowed = ALLOWED.get(used.name)
        parts[used.name] = {
            "files": used.files,
            "bytes": used.size,
            "budget": allowed.total if allowed else None,
        }
    return {"bytes": sum(p["bytes"] for p in parts.values()), "budget": TOTAL, "parts": parts}


def upstream(root: Path) -> dict[str, Any]:
    """The pinned version, files of ours that follow another one, and the last drift looked at."""
    other = sorted(
        path.relative_to(root).as_posix()
        for path in (root / "vllmx").rglob("*.py")
        for line in path.read_text(encoding="utf-8").split("\n")[:6]
        if line.startswith("# upstream:") and "@ v" in line and f"@ v{PINNED}" not in line
    )
    followed = {name for names in anchors(root).values() for name in names}
    path = root / "reports" / DRIFT
    drift = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    seen = None
    if drift is not None:
        touched = {name for hit in drift["ours"].values() for name in hit["ours"]}
        seen = {
            "from": drift["from"],
            "to": drift["to"],
            "files": {how: len(names) for how, names in drift["files"].items()},
            "kinds": {k["kind"]: [len(k["new"]), len(k["gone"])] for k in drift["kinds"]},
            "ours": len(touched),
        }
    return {"pinned": PINNED, "following": len(followed), "other": other, "drift": seen}


def environment(evidence: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where evidence came from: device, machine, versions; rows and the newest time of each."""
    found: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in evidence:
        facts = {
            "device": str(row["device"].get("name", "")),
            **{key: str(row["device"].get(key, "")) for key in ("model", "sm", "cuda", "isa")},
            **{key: str(row["run"].get(key, "")) for key in VERSIONS},
        }
        entry = found.setdefault(tuple(facts.values()), {**facts, "rows": 0, "newest": ""})
        entry["rows"] += 1
        entry["newest"] = max(entry["newest"], row["ts"])
    return [found[key] for key in sorted(found)]
