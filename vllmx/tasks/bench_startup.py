# SPDX-License-Identifier: Apache-2.0
"""`vllmx bench startup`: from the start of the process to its first token, as a table.

The engine is started anew for each line: first with empty compile caches, then with those that the
starts before have filled. Where the time goes is what the process itself says.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig
from vllmx.tasks.bench_side_by_side import OURS, Child, options_of, start
from vllmx.tasks.local import require_model

CACHE = "TRITON_CACHE_DIR"
"""Names the folder of compiled kernels, which Triton keys by their source and its own version; set
for the child alone. The C kernels of a CPU are compiled once a machine and stay."""


def measure_startup(config: RunConfig) -> dict[str, Any]:
    """Seconds of one cold start and bench.num_iters warm ones; the table goes to stderr."""
    require_model(config)
    options = options_of(config)
    options["model"] = config.model.name or options["model"]
    with tempfile.TemporaryDirectory(prefix="vllmx-startup-") as scratch:
        folder = Path(scratch)
        caches = {CACHE: str(folder / "kernels")}
        runs = []
        for number in range(1 + max(config.bench.num_iters, 1)):
            child = start(f"start {number}", sys.executable, OURS, options, folder, **caches)
            try:
                child.wait_ready()
            finally:
                child.close()
            runs.append(_parts(child))
    warm = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
    print(table({"cold caches": runs[0], "warm caches": warm}), file=sys.stderr)
    return {"cold": runs[0], "warm": warm, "runs": runs, "options": options}


def _parts(child: Child) -> dict[str, float]:
    """Where the seconds went: Python and imports, weights and graphs, the first token."""
    told = child.told
    return {
        "import": child.ready_s - told["first_token_s"] + told["import_s"],
        "engine": told["engine_s"] - told["import_s"],
        "first token": told["first_token_s"] - told["engine_s"],
        "all": child.ready_s,
    }


def table(lines: dict[str, dict[str, float]]) -> str:
    """The seconds of each line, a column a part."""
    parts = list(next(iter(lines.values())))
    rows = [["seconds", *parts]]
    rows += [[name, *(f"{line[part]:.2f}" for part in parts)] for name, line in lines.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths)) for row in rows)
