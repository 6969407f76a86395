# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text: no script, no library, readable in light and dark, the same bytes each time.

Colours come from CSS variables of the page (report_html.py); every mark has a title, so that its
value is there without a mouse too: in the table beside the chart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH = 400


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, int]]], order: Sequence[str]) -> str:
    """A bar a row, split by the names of `order`; as long as its total against the longest."""
    longest = max((sum(values.values()) for _, values in rows), default=0) or 1
    height, left = 24, 70
    room = WIDTH - left - 36
    parts = []
    for number, (label, values) in enumerate(rows):
        y = number * height + 4
        parts.append(_text(left - 8, y + 13, label, "end"))
        x = float(left)
        for name in order:
            count = values.get(name, 0)
            if not count:
                continue
            wide = room * count / longest
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(wide - 1, 1):.1f}" height="18" rx="2" '
                f'class="s-{name}"><title>{escape(label)}: {count} {name}</title></rect>'
            )
            if wide > 18:
                parts.append(_text(x + wide / 2, y + 13, str(count), "middle", f"on on-{name}"))
            x += wide
        parts.append(_text(x + 6, y + 13, str(sum(values.values())), "start"))
    return _svg(parts, len(rows) * height + 8)


def histogram(values: Sequence[float], edges: Sequence[float], mark: float) -> str:
    """Counts of `values` between `edges`; a line where the value is `mark`, which is an edge."""
    counts = [0] * (len(edges) - 1)
    for value in values:
        place = sum(value >= edge for edge in edges) - 1
        counts[min(max(place, 0), len(counts) - 1)] += 1
    tallest = max(counts, default=0) or 1
    left, top, base = 16, 14, 130
    step = (WIDTH - left - 20) / len(counts)
    parts = []
    for number, count in enumerate(counts):
        x, high = left + number * step, (base - top) * count / tallest
        low, up = edges[number], edges[number + 1]
        below = up <= mark
        if count:
            parts.append(
                f'<rect x="{x + 1:.1f}" y="{base - high:.1f}" width="{step - 2:.1f}" '
                f'height="{high:.1f}" class="{"s-RED" if below else "bar"}">'
                f"<title>{low:g} to {up:g}: {count}</title></rect>"
            )
            parts.append(_text(x + step / 2, base - high - 3, str(count), "middle"))
        parts.append(_text(x, base + 14, f"{low:g}", "middle"))
    x = left + edges.index(mark) * step
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{base}" class="limit"/>')
    parts.append(f'<line x1="{left}" x2="{WIDTH - 20}" y1="{base}" y2="{base}" class="axis"/>')
    parts.append(_text(WIDTH - 20, base + 30, "limit / measured; left of the line fails", "end"))
    return _svg(parts, base + 38)


def curves(series: Mapping[str, Sequence[float]], labels: Sequence[str]) -> str:
    """A line a series over the places of `labels`, on a logarithmic scale."""
    flat = [value for values in series.values() for value in values if value > 0]
    if not flat:
        return ""
    low, high = math.floor(math.log10(min(flat))), math.ceil(math.log10(max(flat)))
    high = max(high, low + 1)
    left, top, base = 40, 10, 150
    step = (WIDTH - left - 20) / max(len(labels) - 1, 1)

    def place(number: int, value: float) -> str:
        share = (math.log10(max(value, 10.0**low)) - low) / (high - low)
        return f"{left + number * step:.1f},{base - (base - top) * share:.1f}"

    parts = []
    for power in range(low, high + 1):
        y = base - (base - top) * (power - low) / (high - low)
        parts.append(
            f'<line x1="{left}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>'
        )
        parts.append(_text(left - 6, y + 4, f"1e{power}", "end"))
    for number, (name, values) in enumerate(series.items()):
        points = " ".join(place(i, value) for i, value in enumerate(values))
        parts.append(
            f'<polyline points="{points}" class="line l{number % 4}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        parts.append(_text(left + number * 120, base + 36, f"— {name}", "start", f"t{number % 4}"))
    for number in {0, len(labels) // 2, len(labels) - 1}:
        parts.append(_text(left + number * step, base + 16, labels[number], "middle"))
    return _svg(parts, base + 44)


def _text(x: float, y: float, text: str, anchor: str, name: str = "") -> str:
    kind = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def _svg(parts: Sequence[str], height: float) -> str:
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" xmlns="http://www.w3.org/2000/svg">'
        f"\n{body}\n</svg>"
    )
