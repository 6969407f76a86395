# SPDX-License-Identifier: Apache-2.0
"""What a decode step costs the host in vllmx and in upstream vLLM, in one run, in turn.

    python -m parity.engine_overhead --out reports/engine_overhead

No model runs: both sides get scripted tokens. A step is schedule, the scripted runner,
update_from_output and output processing, of requests that all decode. Each side is one process on
the same core; the sides take turns, so that a noisy machine disturbs both alike. Upstream's side
(`oracles/vllm_engine_overhead.py`) needs the environment of `nox -s oracle`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

from .checkpoints import gguf_file
from .evidence import run_facts
from .model_table import MODELS
from .oracle_process import ROOT, python_of

MODEL = "smollm2-135m"
NUM_RUNNING = (1, 16, 64, 256, 1024)
NUM_STEPS = 64
DETOKENIZE = {"tokens": 0, "text": 1}
"""What comes out of a step -> whether it is detokenized."""
WANTED_MS = {"tokens": 1.5, "text": 2.2}
"""Milliseconds of a step of 256 requests."""
SIDES = {"vllmx": "parity.engine_overhead_child", "vllm": "oracles.vllm_engine_overhead"}

Times = dict[str, dict[str, dict[int, list[float]]]]
"""side -> output -> running requests -> milliseconds of a step, one figure a round."""


class Side:
    """One process that times steps when it is asked."""

    def __init__(self, name: str, file: Path, core: int) -> None:
        python = sys.executable if name == "vllmx" else python_of("vllm_scheduler")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            [python, "-m", SIDES[name], str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
        )
        os.sched_setaffinity(self.process.pid, {core})
        assert self.process.stdout is not None and self.process.stdin is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{name} did not start; run `{python} -m {SIDES[name]} {file}`")

    def milliseconds(self, num_running: int, detokenize: int) -> float:
        """Mean of a step over NUM_STEPS steps."""
        assert self.process.stdout is not None and self.process.stdin is not None
        print(num_running, NUM_STEPS, detokenize, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline()) * 1e3


def measure(sides: dict[str, Side], rounds: int) -> Times:
    """All sizes, one round of all sides after another; the first round warms up and is dropped."""
    times: Times = {
        side: {output: {n: [] for n in NUM_RUNNING} for output in DETOKENIZE} for side in sides
    }
    for round_number in range(rounds + 1):
        for output, detokenize in DETOKENIZE.items():
            for num_running in NUM_RUNNING:
                for name, side in sides.items():
                    value = side.milliseconds(num_running, detokenize)
                    if round_number:
                        times[name][output][num_running].append(value)
    return times


def growth(by_size: dict[int, float]) -> float:
    """The largest factor by which a request gets dearer from 16 running requests to more."""
    per_request = {n: value / n for n, value in by_size.items() if n >= 16}
    return max(per_request.values()) / per_request[16]


def as_markdown(result: dict) -> str:
    """The report."""
    lines = [
        "# What a decode step costs the host",
        "",
        "Made by `python -m parity.engine_overhead --out reports/engine_overhead`; do not edit. "
        f"{result['machine']}, commit {result['commit']}, Python {result['python']}.",
        "",
        "Milliseconds of a step in which all requests decode: schedule, a scripted runner, update "
        "and output processing, without a model. Both sides in one run on one core, in turn; "
        f"medians of {result['rounds']} rounds of {NUM_STEPS} steps after one that is dropped. "
        "vllmx is `EngineCore.step` on `NullModelRunner` and `OutputProcessor`; upstream is its "
        "own Scheduler, `update_from_output` and OutputProcessor in process. Prompts of 16 "
        "tokens, blocks of 16, prefix caching on, statistics off, greedy, DELTA outputs.",
        "",
        "| running | output | vllmx ms | us a request | upstream ms | us a request | upstream / "
        "vllmx | wanted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for output, by_size in result["median"]["vllmx"].items():
        for size, ours in by_size.items():
            theirs = result["median"]["vllm"][output][size]
            n = int(size)
            wanted = f"<= {WANTED_MS[output]} ms" if n == 256 else ""
            lines.append(
                f"| {n} | {output} | {ours:.3f} | {ours / n * 1e3:.1f} | {theirs:.3f} "
                f"| {theirs / n * 1e3:.1f} | {theirs / ours:.1f} | {wanted} |"
            )
    factors = ", ".join(f"{output} {value:.2f}" for output, value in result["growth"].items())
    lines += [
        "",
        "Growth: the dearest request at 16 to 1,024 running ones costs this many times what it "
        f"costs at 16 (1 or less is linear): {factors}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write PATH.json and PATH.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="engine_overhead", help="path without suffix")
    parser.add_argument("--rounds", type=int, default=7)
    # The first core is where a machine's interrupts go.
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    args = parser.parse_args()
    file = gguf_file(MODELS[MODEL])
    sides = {name: Side(name, file, args.core) for name in SIDES}
    times = measure(sides, args.rounds)
    median = {
        side: {
            output: {size: statistics.median(values) for size, values in by_size.items()}
            for output, by_size in outputs.items()
        }
        for side, outputs in times.items()
    }
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, one used",
        "python": platform.python_version(),
        "commit": run_facts()["git"][:9],
        "rounds": args.rounds,
        "median": median,
        "growth": {output: growth(by_size) for output, by_size in median["vllmx"].items()},
        "times": times,
    }
    text = json.dumps(result, indent=1) + "\n"
    # Sizes are text in JSON; the report is made of what the file holds.
    result = json.loads(text)
    Path(f"{args.out}.json").write_text(text)
    Path(f"{args.out}.md").write_text(as_markdown(result))


if __name__ == "__main__":
    main()
