# SPDX-License-Identifier: Apache-2.0
"""All that can be shown on this machine, in one go and within a time box.

    python -m parity.nightly [--minutes 60] [--only replay,collect] [--device cpu]

What is asked of a CPU always runs; where there is a GPU, its own steps run beside that.
Each step is a `vllmx parity` command of its own process. The canary goes first: if it isn't found,
nothing after it counts. A step that fails does not keep the others from running; what the time box
leaves undone is missing, not passed. Ledger and report are always written at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEANING = {0: "passed", 1: "failed", 2: "invalid", 3: "blocked", None: "out of time"}
LAST_SECONDS = 300.0
"""Kept for ledger and report."""
BOXED = ("record", "replay", "probe", "collect", "mutate")
"""Verbs that keep to a time of their own, a little less, so that what they have shown is kept."""
DEVICE = "cpu leaves out what needs a GPU, cuda never does, where there is none it is blocked"
MEMORY = "cache.gpu_memory_utilization=0.4"
"""On a machine whose GPU and CPU share their memory, more of it can take the machine down."""


@dataclass(frozen=True)
class Step:
    """One command: its share of the time box, and whether it is part of the short run."""

    name: str
    arguments: tuple[str, ...]
    share: float = 1.0
    short: bool = True
    device: str = ""
    """What it computes on, where it has to be told: cells of ops and models are of a CPU, what a
    GPU shows counts beside them, not for them."""
    gpu: bool = False
    """Whether it only makes sense where there is a GPU."""


STEPS = (
    Step("canary", ("collect", "suite.canary")),
    Step("budget", ("budget",)),
    Step("record", ("record", "--check"), 0.2, short=False),
    Step("record-models", ("record", "--check", "model."), 0.2, short=False),
    Step("replay", ("replay",), 0.4, device="cpu"),
    Step("replay-gpu", ("replay",), 0.4, device="cuda", gpu=True),
    Step("probe", ("probe",), 0.2, short=False, device="cpu"),
    Step("probe-gpu", ("probe",), 0.2, short=False, device="cuda", gpu=True),
    Step("collect", ("collect",), 0.6),
    Step("collect-gpu", ("collect", "device=cuda"), 0.3, gpu=True),
    Step("upstream", ("upstream-tests", "output_dir=reports"), 0.6, short=False),
    Step("mutate", ("mutate",), 0.6, short=False),
)
ALWAYS = (Step("ledger", ("ledger",)), Step("report", ("report",)))


@dataclass(frozen=True)
class Outcome:
    """What became of a step; `code` is None if time ran out."""

    step: str
    code: int | None
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run the steps and return the gravest exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", default="", help="names of steps, separated by commas")
    parser.add_argument("--short", action="store_true", help="leave the long steps out")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help=DEVICE)
    options = parser.parse_args(argv)
    names = [name for name in options.only.split(",") if name]
    if unknown := set(names) - {step.name for step in STEPS}:
        parser.error(f"no step {', '.join(sorted(unknown))}")
    chosen = [s for s in STEPS if (s.name in names if names else s.short or not options.short)]
    if options.device != "cuda" and not has_gpu(options.device):
        chosen = [step for step in chosen if not step.gpu]
    outcomes = run_all(chosen, 60 * options.minutes)
    for outcome in outcomes:
        meaning = MEANING.get(outcome.code, "failed")
        print(f"{outcome.step:<13} {meaning:<12} {outcome.seconds:.0f} s")
    return gravest(outcomes)


def has_gpu(device: str) -> bool:
    """Whether there is a GPU here, and it may be used."""
    import torch

    return device != "cpu" and torch.cuda.is_available()


def run_all(steps: Sequence[Step], seconds: float) -> list[Outcome]:
    """Run `steps` within `seconds`, then ledger and report."""
    end = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    for step in steps:
        left = end - time.monotonic() - LAST_SECONDS
        outcomes.append(run_step(step, min(left, seconds * step.share)))
        if step.name == "canary" and outcomes[-1].code != 0:
            break
    for step in ALWAYS:
        outcomes.append(run_step(step, max(end - time.monotonic(), LAST_SECONDS)))
    return outcomes


def run_step(step: Step, seconds: float) -> Outcome:
    """Run one step for at most `seconds`."""
    started = time.monotonic()
    if util.find_spec(f"parity.{step.arguments[0].replace('-', '_')}") is None:
        return Outcome(step.name, 3, 0.0)
    if seconds <= 0:
        return Outcome(step.name, None, 0.0)
    arguments = [*step.arguments]
    if step.device:
        arguments += [f"device.device={step.device}", MEMORY]
    if step.arguments[0] in BOXED:
        arguments.append(f"minutes={max(seconds / 60 - 1, 0.1):.2f}")
    print(f"--- vllmx parity {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-m", "vllmx", "parity", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(_search())}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    code: int | None = None
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        print(f"--- {step.name}: out of time after {seconds:.0f} s", flush=True)
    finally:
        # A step has children of its own, tests and engines; none may outlive its box.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return Outcome(step.name, code, time.monotonic() - started)


def gravest(outcomes: Sequence[Outcome]) -> int:
    """1 if a step failed or died, else 2 if one was invalid or unfinished, else 3 or 0."""
    codes = {outcome.code for outcome in outcomes}
    if codes - {0, 2, 3, None}:
        return 1
    if codes & {2, None}:
        return 2
    return 3 if 3 in codes else 0


def _search() -> list[str]:
    return [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


if __name__ == "__main__":
    sys.exit(main())
