# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML file: no script, nothing loaded, readable on a phone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from . import svg
from .ledger import TIERS, places, share, short, worst
from .report_data import FIGURES
from .report_md import (
    BESIDE,
    MODEL_HEAD,
    SHARES,
    TREND_HEAD,
    adds_up,
    broken_limit,
    cells_of,
    lane_figures,
    megabytes,
    missed_target,
    model_rows,
    mutation_score,
    trend_rows,
)
from .status import STATUSES

COLOURS = {
    "GREEN": "#2e8b57",
    "DRIFT": "#7fb069",
    "YELLOW": "#d4b106",
    "PARTIAL": "#4a90a4",
    "STALE": "#b07d3c",
    "UNPROVEN": "#8a8f98",
    "BLOCKED": "#6b5b95",
    "MISSING": "#c9ccd1",
    "SUSPECT": "#e07a3f",
    "RED": "#c62f2f",
}
EDGES = (0.0, 0.5, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0, 100.0, 1e7)
STYLE = """
:root { --ink: #1c1e21; --paper: #ffffff; --faint: #e4e6ea; --soft: #5f6672; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --paper: #16181b; --faint: #33373d; --soft: #9aa1ac; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 60rem; padding: 1rem; background: var(--paper);
  color: var(--ink); font: 16px/1.45 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem .9rem; margin: .5rem 0 1rem; }
a { color: inherit; } code { font-size: .85em; overflow-wrap: anywhere; }
.invalid { border: 2px solid #c62f2f; padding: .5rem .75rem; font-weight: 600; }
.missed { border-left: .3rem solid #e07a3f; padding: .1rem .6rem; font-weight: 600; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .3rem .5rem;
  border-bottom: 1px solid var(--faint); }
th { color: var(--soft); font-weight: 600; } td.n { white-space: nowrap; }
td.c { min-width: 18rem; } td.t { min-width: 9rem; }
td.c code { display: block; max-height: 7rem; overflow-y: auto; }
.tag { display: inline-block; padding: 0 .45em; border-radius: .3em; color: #fff;
  font-size: .78rem; font-weight: 600; white-space: nowrap; }
.tag.MISSING { color: #1c1e21; }
svg { width: 100%; max-width: 34rem; height: auto; display: block; }
svg text { fill: var(--ink); font: 10px system-ui, sans-serif; } svg text.on { fill: #fff; }
svg text.on-MISSING, svg text.on-YELLOW { fill: #1c1e21; }
.axis, .grid { stroke: var(--faint); } .limit { stroke: #c62f2f; stroke-dasharray: 4 3; }
.bar { fill: #4a78b5; } .line { fill: none; stroke-width: 2; }
.l0 { stroke: #4a78b5; } .l1 { stroke: #b07d3c; } .l2 { stroke: #2e8b57; } .l3 { stroke: #6b5b95; }
svg text.t0 { fill: #4a78b5; } svg text.t1 { fill: #b07d3c; }
svg text.t2 { fill: #2e8b57; } svg text.t3 { fill: #6b5b95; }
.soft { color: var(--soft); } details { margin: .4rem 0; } summary { cursor: pointer; }
"""
SECTIONS = (
    ("status", "Status"),
    ("red", "Red"),
    ("run", "To be run"),
    ("headroom", "Headroom"),
    ("models", "Models"),
    ("providers", "Providers"),
    ("mutation", "Planted faults"),
    ("goldens", "Goldens"),
    ("lanes", "Oracles among themselves"),
    ("trend", "So far"),
    ("upstream", "Upstream"),
    ("environment", "Environments"),
    ("rows", "All features"),
)


def page(data: Mapping[str, Any]) -> str:
    """The page."""
    parts = {
        "status": _status(data),
        "red": _red(data["red"], data["more_red"]),
        "run": _stale(data["stale"]),
        "headroom": _headroom(data["headroom"]),
        "models": _models(data["models"]),
        "providers": _providers(data["providers"]),
        "mutation": _mutation(data["mutation"]),
        "goldens": _goldens(data["goldens"]),
        "lanes": _lanes(data["lanes"]),
        "trend": _trend(data["trend"]),
        "upstream": _upstream(data["upstream"]),
        "environment": _environment(data["environment"]),
        "rows": _rows(data["rows"]),
    }
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title in SECTIONS)
    body = "\n".join(
        f'<section id="{name}"><h2>{title}</h2>\n{parts[name]}\n</section>'
        for name, title in SECTIONS
    )
    trouble = "".join(f'<p class="invalid">INVALID: {escape(t)}</p>' for t in data["trouble"])
    trouble += _missed_target(data["mutation"])
    colours = "".join(
        f".s-{name} {{ fill: {colour}; }} .tag.{name} {{ background: {colour}; }}\n"
        for name, colour in COLOURS.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>vllmx: parity with upstream</title>
<style>{STYLE}{colours}</style>
</head>
<body>
<h1>Parity with upstream</h1>
{trouble}
<p>{escape(data["equation"])} features. Cells: {escape(adds_up(data["cells"]))}.</p>
{_beside(data["beside"])}
<p class="soft">As of {data["as_of"]}, the time of the newest evidence. The canary, a planted
fault, is {_tag(data["canary"])}. No status is typed by hand: each follows from evidence.</p>
<nav>{links}</nav>
{body}
</body>
</html>
"""


def _beside(found: Mapping[str, Mapping[str, Any]]) -> str:
    return f"<p>Beside them, {BESIDE}: {escape(places(found))}.</p>" if found else ""


def _tag(status: str) -> str:
    return f'<span class="tag {escape(status)}">{escape(status)}</span>'


def _table(head: Sequence[str], rows: Iterable[Iterable[Any]], empty: str = "no data") -> str:
    """A table that scrolls sideways by itself. Values that start with `<` are markup."""
    listed = [list(row) for row in rows]
    if not listed:
        return f'<p class="soft">{empty}</p>'
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "\n".join("<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in listed)
    return f'<div class="wide"><table><tr>{names}</tr>\n{body}\n</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, (int, float)):
        return f'<td class="n">{value}</td>'
    text = str(value)
    if text.startswith("<code"):
        return f'<td class="c">{text}</td>'
    if text.startswith("<span"):
        return f"<td>{text}</td>"
    kind = ' class="t"' if len(text) > 24 else ""
    return f"<td{kind}>{escape(text)}</td>"


def _code(command: str) -> str:
    return f"<code>{escape(command)}</code>" if command else ""


def _codes(commands: Sequence[str]) -> str:
    """Several commands, a line each."""
    return "<br>".join(_code(command) for command in commands)


def _status(data: Mapping[str, Any]) -> str:
    used = [name for name in STATUSES if data["statuses"][name]]
    legend = " ".join(_tag(name) for name in used)
    tiers = svg.stacked_bars([(tier, data["tiers"][tier]) for tier in TIERS], used)
    areas = svg.stacked_bars(list(data["areas"].items()), used)
    numbers = _table(
        ["tier", *used],
        [[tier, *(data["tiers"][tier][name] for name in used)] for tier in TIERS],
    )
    evidence = data["evidence"]
    told = (
        f"{evidence['rows']} rows of evidence in {evidence['files']} files: "
        f"{adds_up(evidence['verdicts'])}; {evidence['dirty']} of a tree with uncommitted changes."
    )
    return (
        f"<p>{legend}</p>\n{tiers}\n{numbers}\n<h3>By area</h3>\n{areas}\n"
        f'<p class="soft">{escape(told)}</p>'
    )


def _red(cells: Sequence[Mapping[str, Any]], more: int) -> str:
    rows = [
        [
            _tag(c["status"]),
            c["cell"],
            c["reason"],
            broken_limit(c["broken"]),
            c["worst"],
            _code(c["command"]),
        ]
        for c in cells
    ]
    rest = f"<p>and {more} more</p>" if more else ""
    return _table(["", "cell", "why", "limit", "worst at", "again with"], rows, "none") + rest


def _stale(entries: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [_tag(e["status"]), e["cells"], e["cause"], cells_of(e["of"], 24), _codes(e["commands"])]
        for e in entries
    ]
    return _table(["", "cells", "why", "of", "run"], rows, "nothing")


def _headroom(found: Mapping[str, Any]) -> str:
    if not found["values"]:
        return '<p class="soft">no data</p>'
    chart = svg.histogram(found["values"], EDGES, 1.0)
    head = ["limit / measured", "cell", "worst at"]
    loose = _table(head, found["loosest"])
    return (
        f"{chart}\n<p>Nearest to their limit:</p>\n{_table(head, found['tightest'])}\n"
        "<details><summary>Farthest from it: limits that could be tighter</summary>"
        f"{loose}</details>"
    )


def _models(found: Mapping[str, Mapping[str, Any]]) -> str:
    """A line a model; what each of its runs was is folded."""
    rows = [[name, _tag(status), *rest] for name, status, *rest in model_rows(found)]
    folded = "\n".join(_model(name, entry) for name, entry in found.items())
    return _table(MODEL_HEAD, rows) + (
        f"<details><summary>Runs and layers of each</summary>\n{folded}</details>" if found else ""
    )


def _model(name: str, entry: Mapping[str, Any]) -> str:
    rows = [
        [
            *(run["run"], _tag(run["status"]), _figure(run["headroom"]), run["check"]),
            *(_figure(run["measured"]), _figure(run["limit"])),
            *(_figure(run["figures"].get(figure)) for figure in FIGURES),
        ]
        for run in entry["runs"]
    ]
    head = ["run", "", "limit / measured", "nearest", "measured", "limit", *FIGURES]
    chart = '<p class="soft">by layer: no data</p>'
    if layers := entry["layers"]:
        numbers = range(max(map(len, layers.values())))
        chart = svg.curves(layers, [str(number) for number in numbers])
    return f"<details><summary>{escape(name)}</summary>{_table(head, rows)}{chart}</details>"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _providers(found: Mapping[str, Mapping[str, Any]]) -> str:
    columns = sorted({place for ops in found.values() for place in ops})
    rows = [
        [op, *(_share(by_place[c]) if c in by_place else "" for c in columns)]
        for op, by_place in found.items()
    ]
    note = f'<p class="soft">{SHARES}</p>' if rows else ""
    return note + _table(["op", *columns], rows)


def _share(counts: Mapping[str, Any]) -> str:
    return f'<span class="tag {worst(counts["statuses"])}">{share(counts)}</span>'


def _missed_target(found: Mapping[str, Any]) -> str:
    words = missed_target(found)
    return f'<p class="missed">{escape(words)}</p>' if words else ""


def _mutation(found: Mapping[str, Any]) -> str:
    rows = [[name, adds_up(counts)] for name, counts in found["categories"].items()]
    parts = [f"<p>{escape(mutation_score(found))}</p>", _missed_target(found)]
    parts.append(_table(["category", "faults"], rows))
    if found["looked"]:
        parts.append(_table(["not found"], [[text] for text in found["missed"]], "none"))
    return "\n".join(parts)


def _goldens(found: Mapping[str, Any]) -> str:
    rows: list[list[Any]] = [
        [name, part["files"], megabytes(part["bytes"]), megabytes(part["budget"])]
        for name, part in found["parts"].items()
    ]
    rows.append(["all", "", megabytes(found["bytes"]), megabytes(found["budget"])])
    return _table(["folder", "files", "MB", "allowed MB"], rows)


def _lanes(found: Sequence[Mapping[str, Any]]) -> str:
    note = (
        '<p class="soft">What other kernels of an oracle, or another oracle, are off by on the '
        "same inputs: the floor under every limit.</p>"
    )
    rows = [[e["of"], e["lane"], e["cases"], lane_figures(e)] for e in found]
    return _table(["of", "other lane", "cases", "off by"], rows) + (note if rows else "")


def _trend(points: list[dict[str, Any]]) -> str:
    green = {
        "features green": [float(p["features"].get("GREEN", 0)) for p in points],
        "cells green": [float(p["cells"].get("GREEN", 0)) for p in points],
    }
    chart = svg.curves(green, [p["as_of"][5:10] for p in points]) if len(points) > 1 else ""
    return chart + _table(TREND_HEAD, trend_rows(points))


def _upstream(found: Mapping[str, Any]) -> str:
    words = f"{found['following']} files of ours follow upstream {found['pinned']}."
    if found["other"]:
        words += f" Another version: {', '.join(found['other'])}."
    seen = found["drift"]
    if seen is None:
        return f'<p>{escape(words)}</p><p class="soft">Drift to a newer version: no data</p>'
    files = ", ".join(f"{number} {how}" for how, number in seen["files"].items())
    words += f" Drift to {seen['to']}: files {files}; {seen['ours']} of our files are touched."
    rows = [[kind, new, gone] for kind, (new, gone) in seen["kinds"].items()]
    return f"<p>{escape(words)}</p>{_table(['kind', 'new', 'gone'], rows)}"


def _environment(found: Sequence[Mapping[str, Any]]) -> str:
    return _table(list(found[0]) if found else [], [entry.values() for entry in found])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    listed = [
        [
            row["id"],
            row["tier"],
            _tag(row["status"]),
            short(row["reason"], 240),
            sum(row["cells"].values()),
            row["proven"][:10],
        ]
        for row in rows
    ]
    head = ["id", "tier", "status", "why", "cells", "last shown"]
    return _table(head, listed)
