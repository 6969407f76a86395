# SPDX-License-Identifier: Apache-2.0
"""The table of ours beside upstream on a GPU, from the raw results of `vllmx bench side-by-side`.

    python -m parity.gpu_report

Reads reports/gpu/raw/MODEL.N.json, where a later N replaces the rows that it has again, and writes
reports/gpu/side_by_side.json, a list of {model, row, ours, upstream, ratio, floor_fraction,
repeats, commit}, and side_by_side.md and .svg.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "reports" / "gpu"
WANTED = {
    ("Qwen3-0.6B", "1x16+256"): 2.0,
    ("Qwen3-0.6B", "8x16+256"): 2.0,
    ("Qwen3-0.6B", "32x16+256"): 1.8,
    ("Qwen3-0.6B", "128x16+256"): 1.6,
    ("Qwen3-0.6B", "256x16+256"): 1.7,
    ("Qwen3-0.6B", "8x2048+1"): 1.5,
    ("Qwen3-0.6B", "256x512+128"): 1.4,
    ("Qwen3-8B", "1x16+256"): 1.10,
    ("Qwen3-8B", "32x16+256"): 1.10,
    ("Qwen3-8B", "256x16+256"): 1.25,
    ("Qwen3-8B", "8x2048+1"): 1.05,
    ("Qwen3-8B", "256x512+128"): 1.10,
}
"""(model, row) -> the ratio that is wanted."""
COLUMNS = ("model", "row", "ours", "upstream", "ratio", "floor_fraction", "repeats", "commit")
RUNS = "runs"
"""The ratios of every run of a row, in their order: machines differ, and hosts more than GPUs."""


def rows(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """The newest result of every row, in the order of WANTED."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in sorted((folder / "raw").glob("qwen3-*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"]:
            key = run["model"], row["row"]
            told = {"model": run["model"], "commit": run["commit"], **row}
            earlier = found[key][RUNS] if key in found else []
            found[key] = {name: told[name] for name in COLUMNS}
            found[key][RUNS] = [*earlier, round(row["ratio"], 3)]
    return [found[key] for key in WANTED if key in found]


def as_markdown(table: list[dict[str, Any]]) -> str:
    """The table with what is wanted beside it."""
    lines = [
        "| model | batch x in + out | vllmx tok/s | upstream tok/s | ratio | wanted | of the floor "
        "| repeats | commit | every run |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in table:
        wanted = WANTED[row["model"], row["row"]]
        met = "met" if row["ratio"] >= wanted else "**not met**"
        lines.append(
            f"| {row['model']} | {row['row']} | {row['ours']:,.0f} | {row['upstream']:,.0f} "
            f"| {row['ratio']:.2f} | {wanted:.2f}, {met} | {row['floor_fraction']:.0%} "
            f"| {row['repeats']} | {row['commit']} | {', '.join(f'{r:.2f}' for r in row[RUNS])} |"
        )
    return "\n".join(lines) + "\n"


def as_svg(table: list[dict[str, Any]]) -> str:
    """Bars of the ratios, a mark at what is wanted and a line at 1."""
    height, left, scale = 22, 190, 150
    parts = []
    for number, row in enumerate(table):
        y = 10 + number * height
        width = row["ratio"] * scale
        wanted = left + WANTED[row["model"], row["row"]] * scale
        name = f"{row['model']} {row['row']}"
        parts += [
            f'<text x="{left - 6}" y="{y + 12}" text-anchor="end">{name}</text>',
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="14" fill="#4a7"/>',
            f'<line x1="{wanted:.1f}" x2="{wanted:.1f}" y1="{y - 2}" y2="{y + 16}" stroke="#c33"/>',
            f'<text x="{left + width + 6:.1f}" y="{y + 12}">{row["ratio"]:.2f}</text>',
        ]
    bottom = 14 + len(table) * height
    parts.append(
        f'<line x1="{left + scale}" x2="{left + scale}" y1="4" y2="{bottom}" stroke="#888"/>'
        f'<text x="{left}" y="{bottom + 14}">ours over upstream; red: wanted; grey: 1</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="720" height="{bottom + 24}" '
        'font-family="sans-serif" font-size="12">' + "".join(parts) + "</svg>\n"
    )


def serve_table(folder: Path = FOLDER) -> str:
    """Ours / upstream of each concurrency that both servers were loaded with."""
    lines = [
        "| model | concurrency | output tok/s | ratio | p99 TTFT ms | p99 TPOT ms |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted((folder / "raw").glob("serve-*.json")):
        run = json.loads(path.read_text())
        for row in run["rows"]:
            both = row["ours"], row["upstream"]
            rate, first, each = (
                [side[name] for side in both]
                for name in ("output_throughput", "p99_ttft_ms", "p99_tpot_ms")
            )
            lines.append(
                f"| {run['model']} | {row['concurrency']} | {rate[0]:,.0f} / {rate[1]:,.0f} "
                f"| {rate[0] / rate[1]:.2f} | {first[0]:,.1f} / {first[1]:,.1f} "
                f"| {each[0]:.2f} / {each[1]:.2f} |"
            )
    return "\n".join(lines) + "\n"


def between(text: str, first: str, last: str, made: str) -> str:
    """`text` with `made` between two marks."""
    start, end = text.index(first), text.index(last)
    return f"{text[:start]}{first}\n{made}{text[end:]}"


def main() -> None:
    """Write the three files."""
    table = rows()
    (FOLDER / "side_by_side.json").write_text(json.dumps(table, indent=1) + "\n")
    (FOLDER / "side_by_side.svg").write_text(as_svg(table))
    text = (FOLDER / "side_by_side.md").read_text()
    text = between(text, "<!-- table -->", "<!-- end -->", as_markdown(table))
    text = between(text, "<!-- serve -->", "<!-- end of serve -->", serve_table())
    (FOLDER / "side_by_side.md").write_text(text)


if __name__ == "__main__":
    main()
