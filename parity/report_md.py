# SPDX-License-Identifier: Apache-2.0
"""The report as a short Markdown page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .ledger import TIERS, places, share, short
from .status import RANK, STATUSES

NO_DATA = "no data"
BESIDE = "cells that no row asks for, which count only when they are bad"
SHARES = "Cells whose last run passed, of all; the worst status, unless that is GREEN."
LONGEST = 200
"""Lines of the page."""


def page(data: Mapping[str, Any]) -> str:
    """At most 200 lines; lists are cut shorter where there is much to say."""
    for most in (20, 15, 10, 5):
        lines = _lines(data, most)
        if len(lines) <= LONGEST:
            break
    return "\n".join(lines) + "\n"


def _lines(data: Mapping[str, Any], most: int) -> list[str]:
    """The page with at most `most` lines a list."""
    lines = ["# Parity with upstream", ""]
    lines += [f"**INVALID: {trouble}**" for trouble in data["trouble"]]
    lines += [f"**{words}**" for words in [missed_target(data["mutation"])] if words]
    lines += [
        "Written by `vllmx parity report`; every figure is computed from parity/evidence. As of",
        f"{data['as_of']}. The canary, a planted fault, is {data['canary']}.",
        "",
        f"Features: {data['equation']}",
        f"Cells: {adds_up(data['cells'])}",
        f"Evidence: {data['evidence']['rows']} rows in {data['evidence']['files']} files, "
        f"{data['evidence']['dirty']} of them of a tree with uncommitted changes",
        *_beside(data["beside"]),
        "",
    ]
    used = [name for name in STATUSES if data["statuses"][name]]
    lines += table(
        ["tier", *used],
        [[tier, *(data["tiers"][tier][name] or "" for name in used)] for tier in TIERS],
    )
    areas = (f"{area} {adds_up(_ordered(counts))}" for area, counts in data["areas"].items())
    lines += ["", f"By area: {'; '.join(areas) or NO_DATA}."]
    lines += ["", "## Red and suspect", *_red(data["red"], data["more_red"], most)]
    lines += ["", "## To be run", *_stale(data["stale"], data["commands"], most)]
    lines += ["", "## Nearest to their limit", *_headroom(data["headroom"])]
    lines += ["", "## Providers", *_providers(data["providers"], 8 * most)]
    lines += ["", "## Models", *_models(data["models"], most)]
    lines += ["", "## Planted faults", *_mutation(data["mutation"], most)]
    lines += ["", "## Goldens", *_goldens(data["goldens"])]
    lines += ["", "## Oracles among themselves", *_lanes(data["lanes"], most)]
    lines += ["", "## So far", *_trend(data["trend"], most)]
    lines += ["", "## Upstream", *_upstream(data["upstream"])]
    return [*lines, "", "## Environments", *_environment(data["environment"], most)]


def _beside(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [f"Beside them, {BESIDE}: {places(found)}"] if found else []


def _ordered(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: counts[name] for name in STATUSES if name in counts}


def adds_up(counts: Mapping[str, int]) -> str:
    """`12 = 10 GREEN + 2 RED`."""
    parts = [f"{number} {name}" for name, number in counts.items() if number]
    return f"{sum(counts.values())} = " + (" + ".join(parts) or "0")


def table(head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> list[str]:
    """A table, or `no data`."""
    listed = [[_cell(value) for value in row] for row in rows]
    if not listed:
        return [NO_DATA]
    names = [str(name) for name in head]
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in listed]


def _cell(value: Any) -> str:
    """A value on one line; a command is never cut, as it is to be run."""
    text = str(value) if str(value).startswith("`") else short(str(value), 200)
    return text.replace("|", "\\|")


def _rest(left: int, of: str = "") -> list[str]:
    """That a list goes on; empty if it doesn't."""
    return [f"and {left} more{of}"] if left > 0 else []


def _red(cells: list[dict[str, Any]], more: int, most: int) -> list[str]:
    if not cells:
        return ["none"]
    rows = [
        [
            *(cell["cell"], cell["reason"], broken_limit(cell["broken"]), cell["worst"]),
            f"`{cell['command']}`",
        ]
        for cell in cells[:most]
    ]
    head = ["cell", "why", "limit", "worst at", "again with"]
    return [*table(head, rows), *_rest(more + len(cells) - most)]


def broken_limit(broken: Mapping[str, Any] | None) -> str:
    """`rmse 3.1e-2 > 2.0e-2`."""
    if broken is None:
        return ""
    return f"{broken['name']} {broken['measured']:.3g} > {broken['limit']:.3g}"


def _stale(entries: list[dict[str, Any]], commands: list[str], most: int) -> list[str]:
    if not entries:
        return ["nothing"]
    rows = [[e["status"], e["cells"], e["cause"], cells_of(e["of"], 8)] for e in entries[:most]]
    lines = [*table(["status", "cells", "why", "of"], rows), *_rest(len(entries) - most, " lines")]
    told = ["", "```", *commands[:most], "```"] if commands else []
    return [*lines, *told, *_rest(len(commands) - most, ": `vllmx parity plan` prints them")]


def cells_of(counts: Mapping[str, int], most: int) -> str:
    """`sched.async, runner.graphs (2) and 3 more`: features, with the cells of each."""
    parts = [name + (f" ({number})" if number > 1 else "") for name, number in counts.items()]
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if parts[most:] else "")


def _headroom(found: Mapping[str, Any]) -> list[str]:
    return table(["limit / measured", "cell", "worst at"], found["tightest"])


def _providers(found: Mapping[str, Mapping[str, Any]], most: int) -> list[str]:
    columns = sorted({place for ops in found.values() for place in ops})
    rows = [
        [op, *(share(by_place[c]) if c in by_place else "" for c in columns)]
        for op, by_place in list(found.items())[:most]
    ]
    note = [SHARES, ""] if rows else []
    return [*note, *table(["op", *columns], rows), *_rest(len(found) - most, " ops")]


MODEL_HEAD = ("model", "status", "cells", "limit / measured", "of", "first layer out of line")


def model_rows(found: Mapping[str, Mapping[str, Any]]) -> list[list[Any]]:
    """A row a model, the worst first: its nearest limit, and the layer where its stream departs."""

    def order(name: str) -> tuple[float, ...]:
        tightest = found[name]["tightest"]
        return -RANK[found[name]["status"]], tightest["headroom"] if tightest else 0.0

    rows = []
    for name in sorted(found, key=order):
        entry, tightest = found[name], found[name]["tightest"]
        rows.append(
            [
                *(name, entry["status"], places(entry["places"])),
                NO_DATA if tightest is None else f"{tightest['headroom']:.3g}",
                "" if tightest is None else f"{tightest['check']} ({tightest['run']})",
                entry["layer"] or ("none" if entry["layers"] else NO_DATA),
            ]
        )
    return rows


def _models(found: Mapping[str, Mapping[str, Any]], most: int) -> list[str]:
    rows = model_rows(found)
    return [*table(MODEL_HEAD, rows[:most]), *_rest(len(rows) - most, ", none of them worse")]


def mutation_score(found: Mapping[str, Any]) -> str:
    """`150 of 201 planted faults found (74.6 %), 160 of 201 looked at. ...`; the share is of all of
    them, in runs that count, and rounded down; `no data` where nobody looked."""
    total, looked = found["total"], found["looked"]
    if not looked:
        rest = f": 0 of {total} planted faults looked at, `vllmx parity mutate` plants them"
        return NO_DATA + (rest if total else "")
    percent = 1000 * found["found"] // total / 10
    words = f"{found['found']} of {total} planted faults found ({percent:.1f} %), "
    words += f"{looked} of {total} looked at"
    return f"{words}. Honest alternates: {adds_up(found['honest'])}."


def missed_target(found: Mapping[str, Any]) -> str:
    """That too few planted faults are found; empty where enough are, or none are planted."""
    if found["reached"]:
        return ""
    wanted = f"{100 * found['wanted']:.0f} %"
    return f"Missed target: {wanted} of the planted faults have to be found, {found['found']} are."


def _mutation(found: Mapping[str, Any], most: int) -> list[str]:
    missed = [f"**{words}**"] if (words := missed_target(found)) else []
    categories = (f"{name} {adds_up(counts)}" for name, counts in found["categories"].items())
    parts = [f"By category: {'; '.join(categories)}."] if found["categories"] else []
    lines = [mutation_score(found), *missed, *parts]
    lines += [f"- not found: {words}" for words in found["missed"][:most]]
    return lines + _rest(len(found["missed"]) - most)


def _goldens(found: Mapping[str, Any]) -> list[str]:
    rows = [
        [name, part["files"], megabytes(part["bytes"]), megabytes(part["budget"])]
        for name, part in found["parts"].items()
    ]
    rows.append(["all", "", megabytes(found["bytes"]), megabytes(found["budget"])])
    return table(["folder", "files", "MB", "allowed"], rows)


def megabytes(size: int | None) -> str:
    """In MB of 2**20 bytes, two decimals; empty for None."""
    return "" if size is None else f"{size / (1 << 20):.2f}"


def lane_figures(entry: Mapping[str, Any]) -> str:
    """`rmse 1.2e-7, row 3e-7, ...`: every figure of a lane."""
    return ", ".join(
        f"{name} {value:.3g}"
        for name, value in entry.items()
        if name not in ("of", "lane", "cases")
    )


def _lanes(found: list[dict[str, Any]], most: int) -> list[str]:
    """The largest disagreements of ops, and of models."""
    ops = sorted((e for e in found if "rmse" in e), key=lambda e: -e["rmse"])
    models = sorted((e for e in found if "rmse" not in e), key=lambda e: -e["p99"])
    shown = [*models[:most], *ops[:most]]
    rows = [[e["of"], e["lane"], e["cases"], lane_figures(e)] for e in shown]
    rest = [*_rest(len(models) - most, " models"), *_rest(len(ops) - most, " ops")]
    return [*table(["of", "other lane", "cases", "off by"], rows), *rest]


def trend_rows(points: list[dict[str, Any]]) -> list[list[Any]]:
    """A row for each earlier report, newest first."""
    return [
        [
            *(p["as_of"], adds_up(_ordered(p["features"])), adds_up(_ordered(p["cells"]))),
            "/".join(map(str, p["mutants"])),
            "" if p["headroom"] is None else " / ".join(f"{v:.3g}" for v in p["headroom"]),
            megabytes(p["goldens"]),
        ]
        for p in reversed(points)
    ]


TREND_HEAD = ("as of", "features", "cells", "faults found", "headroom: least, median", "goldens MB")


def _trend(points: list[dict[str, Any]], most: int) -> list[str]:
    return [*table(TREND_HEAD, trend_rows(points)[:most]), *_rest(len(points) - most, " before")]


def _upstream(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['following']} files of ours follow upstream {found['pinned']}."]
    if found["other"]:
        lines.append(f"Another version: {', '.join(found['other'])}.")
    seen = found["drift"]
    if seen is None:
        return [*lines, "Drift to a newer version: " + NO_DATA]
    files = ", ".join(f"{number} {how}" for how, number in seen["files"].items())
    lines.append(f"Drift to {seen['to']}: files {files}; {seen['ours']} of our files are touched.")
    rows = [[kind, new, gone] for kind, (new, gone) in seen["kinds"].items()]
    return [*lines, "", *table(["kind", "new", "gone"], rows)]


def _environment(found: list[dict[str, Any]], most: int) -> list[str]:
    head = list(found[0]) if found else []
    newest = sorted(found, key=lambda entry: entry["newest"], reverse=True)
    rows = [entry.values() for entry in newest[:most]]
    return [*table(head, rows), *_rest(len(found) - most)]
