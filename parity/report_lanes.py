# SPDX-License-Identifier: Apache-2.0
"""Two sections of the report: how far the oracles are from each other, and how things went so far.

The trend is reports/trend.jsonl, a line for each report that was written, ordered by the time of
the evidence it speaks of; writing a report adds its line, and only lines of earlier evidence are
shown, so that what is written doesn't depend on whether it was written before.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .calibrate import Floors
from .golden import GoldenError

TREND = "trend.jsonl"
FIGURES = ("rmse", "row", "worst", "gain")
"""Of a lane of an op: relative to the truth's own scale (compare.Floor)."""


# ---- oracles


def lanes(folder: Path) -> list[dict[str, Any]]:
    """The largest figures of each other lane of an op's oracle, and of a model's second oracle."""
    return [*_op_lanes(folder / "ops"), *_model_lanes(folder / "models")]


def _op_lanes(folder: Path) -> list[dict[str, Any]]:
    try:
        entries = Floors(folder).entries
    except GoldenError:
        return []  # the goldens' own section says that they are damaged
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, entry in sorted(entries.items()):
        op, dtype = name.split("/")[0], name.split(".")[-2]
        for lane, outputs in entry["lanes"].items():
            for figures in outputs.values():
                told = found.setdefault(
                    (op, lane, dtype),
                    {
                        "of": f"{op} {dtype}",
                        "lane": lane,
                        "cases": 0,
                        **dict.fromkeys(FIGURES, 0.0),
                    },
                )
                for figure in FIGURES:
                    told[figure] = max(told[figure], figures[figure])
            if outputs:
                found[op, lane, dtype]["cases"] += 1
    return [found[key] for key in sorted(found)]


def _model_lanes(folder: Path) -> list[dict[str, Any]]:
    from .model_gate import stream_errors
    from .model_golden import load
    from .model_table import MODELS

    found = []
    for entry in MODELS.values():
        try:
            want, floor = load(entry, folder)
        except GoldenError:
            continue  # the goldens' own section says that it is damaged
        base = floor.base or want
        apart = np.abs(floor.val - base.val)
        found.append(
            {
                "of": entry.feature,
                "lane": entry.lanes[1],
                "cases": len(want.next),
                "mean": float(f"{apart.mean():.4g}"),
                "p99": float(f"{np.quantile(apart[:, 0], 0.99):.4g}"),
                "max": float(f"{apart.max():.4g}"),
                "flips": int((floor.top != base.top).sum()),
                "stream": float(f"{stream_errors(base.stream, floor.stream).max():.4g}"),
            }
        )
    return found


# ---- trend


def point(data: Mapping[str, Any]) -> dict[str, Any]:
    """The line of a report."""
    values = data["headroom"]["values"]
    return {
        "as_of": data["as_of"],
        "features": {name: n for name, n in data["statuses"].items() if n},
        "cells": {name: n for name, n in data["cells"].items() if n},
        "headroom": [min(values), round(statistics.median(values), 3)] if values else None,
        "mutants": [data["mutation"]["found"], data["mutation"]["total"]],
        "goldens": data["goldens"]["bytes"],
    }


def earlier(folder: Path, as_of: str) -> list[dict[str, Any]]:
    """The lines of reports of earlier evidence, oldest first; none of a file that isn't there."""
    path = folder / TREND
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    points = {found["as_of"]: found for found in map(json.loads, lines)}
    return [points[time] for time in sorted(points) if time < as_of]


def trend_text(points: list[dict[str, Any]]) -> str:
    """The file with these lines."""
    return "".join(json.dumps(found, sort_keys=True) + "\n" for found in points)
