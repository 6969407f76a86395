# SPDX-License-Identifier: Apache-2.0
"""How far the chunked gated delta rule is from the float64 recurrence, beside upstream's.

    python -m parity.gdn_chunked [--out reports/gdn_chunked]

Every case of the op `chunk_gated_delta_rule`, in every dtype: ours by its definition, and the
golden, which is what upstream's kernel of that dtype gave (a kernel for CPUs in bfloat16, Triton's
in float16, in float32 the recurrence). `rms` is the root mean square of the difference over that of
the truth, `worst` the largest difference over the same. Exit code 1 where ours is further off than
upstream by more than the limits of policy.yaml allow.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from . import golden, policy
from .op_cells import OpCell, expected, implementation
from .torch_calls import Call
from .truths import prepare, truth_of

OP = "chunk_gated_delta_rule"
PROVIDER = "torch"
OUTPUTS = {"out": "out", "ssm_state": "state"}
"""Output of the op -> its name in the report."""


def distance(found: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """`rms` and `worst` of the difference, both over the root mean square of the truth."""
    scale = float(np.sqrt(np.mean(truth**2)))
    apart = found - truth
    rms = float(np.sqrt(np.mean(apart**2)))
    return {"rms": rms / scale, "worst": float(np.abs(apart).max()) / scale}


def measure(cells: list[OpCell] | None = None) -> list[dict[str, Any]]:
    """A row for each case, dtype and output; GoldenError where a golden or the truth is missing."""
    chosen = expected("cpu", f"{OP}/", PROVIDER) if cells is None else cells
    cases = [cell.entry.table.cases[cell.op, cell.case] for cell in chosen]
    drawn = [case.arguments(cell.dtype) for cell, case in zip(chosen, cases)]
    prepare((OP, arguments) for arguments in drawn)
    rows = []
    for cell, case, arguments in zip(chosen, cases, drawn):
        truth = truth_of(OP, arguments)
        assert truth is not None
        ours = Call(cell.entry, case, arguments, implementation(cell))()
        theirs = golden.read(golden.OPS / cell.golden).outputs()
        # A block of the cache that no request has is nobody's work.
        used = np.unique(arguments["state_indices"].data)
        for name, title in OUTPUTS.items():
            rows_of = used if name == "ssm_state" else slice(None)
            exact = truth[name][rows_of]
            rows.append(
                {
                    "case": cell.case,
                    "dtype": cell.dtype,
                    "of": title,
                    "ours": distance(ours[name].values()[rows_of], exact),
                    "upstream": distance(theirs[name].values()[rows_of], exact),
                }
            )
    return rows


def farther(rows: list[dict[str, Any]]) -> list[str]:
    """Where ours is off by more than the policy's multiple of what upstream is, or of float32's own
    rounding."""
    limit = policy.load().limits("scan", OP, PROVIDER, "bf16", "cpu").rmse
    least = float(np.finfo(np.float32).eps)
    return [
        f"{row['case']}/{row['dtype']} {row['of']}"
        for row in rows
        if row["ours"]["rms"] > limit * max(row["upstream"]["rms"], least)
    ]


def render(rows: list[dict[str, Any]]) -> str:
    """The report as Markdown."""
    lines = [
        "# The chunked gated delta rule and the float64 recurrence",
        "",
        "Made by `python -m parity.gdn_chunked --out reports/gdn_chunked`; do not edit. Distances",
        "are over the root mean square of the truth: `rms` of all elements, `worst` of one.",
        "Upstream's figures are those of its goldens: its kernel for CPUs in bf16, Triton's in",
        "f16, its recurrence in f32. Ours is the definition, in float32 and rounded once.",
        "",
        "| case | dtype | of | ours rms | upstream rms | ours worst | upstream worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [row[who][what] for what in ("rms", "worst") for who in ("ours", "upstream")]
        told = " | ".join(f"{figure:.2e}" for figure in figures)
        lines.append(f"| {row['case']} | {row['dtype']} | {row['of']} | {told} |")
    lines += ["", "Furthest of all cases:", ""]
    lines += ["| dtype | of | ours rms | upstream rms |", "|---|---|---|---|"]
    kinds = sorted({(row["dtype"], row["of"]) for row in rows})
    for dtype, of in kinds:
        same = [row for row in rows if (row["dtype"], row["of"]) == (dtype, of)]
        most = [max(row[who]["rms"] for row in same) for who in ("ours", "upstream")]
        lines.append(f"| {dtype} | {of} | {most[0]:.2e} | {most[1]:.2e} |")
    return "\n".join([*lines, ""])


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 where ours is farther off than it may be."""
    parser = argparse.ArgumentParser(prog="python -m parity.gdn_chunked", description=__doc__)
    parser.add_argument("--out", type=Path, help="write NAME.md and NAME.json")
    args = parser.parse_args(argv)
    rows = measure()
    text = render(rows)
    print(text)
    if args.out is not None:
        args.out.with_suffix(".md").write_text(text, encoding="utf-8")
        args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    found = farther(rows)
    for place in found:
        print(f"farther than it may be: {place}")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main())
