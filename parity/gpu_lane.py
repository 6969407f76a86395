# SPDX-License-Identifier: Apache-2.0
"""The GPU's part of the evidence, in a few minutes: every cell of a GPU, many at a time.

    python -m parity.gpu_lane --out FOLDER [--jobs 14] [--only ops,models,tests] [--minutes 8]

Where Triton compiles for most of the time, one process after another wastes a machine. FOLDER gets
one file of evidence, as `vllmx parity replay device=cuda` and `collect device=cuda` would write
them, and a log. On a machine without git the copy needs a stamp (parity/source_stamp.py). Copy the
file into parity/evidence and render the ledger. Exit code as of replay, the worst of all.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import evidence, features
from .model_table import MODELS
from .op_table import OPS
from .replay import EXIT, WORST_FIRST

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("tests", "models", "ops")
MINUTES = 8


def jobs_of(kinds: list[str]) -> list[list[str]]:
    """Command lines of `vllmx parity`, the longest first."""
    jobs: list[list[str]] = []
    if "tests" in kinds:
        shown = [feature.id for feature in features.load() if "gpu" in feature.needs]
        jobs += [["collect", "--select", name] for name in shown]
    if "models" in kinds:
        tiny = [entry.feature for entry in MODELS.values() if entry.tiny]
        jobs += [["replay", "--select", name] for name in tiny]
    if "ops" in kinds:
        by_size = sorted(OPS.values(), key=lambda entry: -len(entry.cases))
        jobs += [["replay", "--select", f"{entry.feature}/"] for entry in by_size]
    return jobs


UNFINISHED = 2


def run(job: list[str], folder: Path, deadline: float) -> tuple[int, float, str]:
    """(exit code, seconds, what it printed); its evidence is in `folder`."""
    started = time.monotonic()
    command = [sys.executable, "-m", "vllmx", "parity", job[0], "device=cuda", *job[1:]]
    command += ["--output-dir", str(folder)]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=max(deadline - started, 1.0),
        )
        code, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, text = UNFINISHED, "stopped for want of time; what it would have shown is missing"
    return code, time.monotonic() - started, text


def gravest(codes: Iterable[int]) -> int:
    """The exit code of several runs: a failure, else something invalid, else blocked."""
    found = set(codes)
    # Whatever else a job ends with, it has not done what it was to do.
    unknown = found - {0, 1, 2, 3}
    return next((code for code in (1, 2, 3) if code in found or (code == 1 and unknown)), 0)


def main() -> int:
    """Run the jobs and join what they show."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--only", default=",".join(KINDS))
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help="what is not done by then is left out"
    )
    parser.add_argument("--dirty", action="store_true", help="look at a changed tree all the same")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    facts = evidence.run_facts()
    print(f"commit {facts['git'] or 'unknown'}, {'dirty' if facts['dirty'] else 'clean'}")
    if facts["dirty"] and not options.dirty:
        print("this tree is not that of a commit, so nothing that it shows could count; --dirty")
        return 2
    deadline = time.monotonic() + 60 * options.minutes
    rows = []
    log = options.out / "gpu_lane.log"
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        folders = Path(scratch)
        jobs = jobs_of(options.only.split(","))
        running = [
            pool.submit(run, job, folders / str(number), deadline)
            for number, job in enumerate(jobs)
        ]
        codes = []
        with log.open("w", encoding="utf-8") as file:
            for job, future in zip(jobs, running):
                code, seconds, text = future.result()
                codes.append(code)
                print(f"== {' '.join(job)}: {code}, {seconds:.0f} s\n{text}", file=file, flush=True)
        for folder in sorted(folders.iterdir()):
            rows += evidence.load(folder)
    bad = [" ".join(job) for job, code in zip(jobs, codes) if code not in (0, 1, 3)]
    print(f"unfinished: {', '.join(bad)}" if bad else f"{len(jobs)} jobs, all to their end")
    if not rows:
        print("no evidence at all")
        return gravest(codes) or UNFINISHED
    verdicts = [row["verdict"] for row in rows]
    for row in rows:
        if row["verdict"] != "pass":
            print(*(row[k] for k in ("verdict", "feature", "case", "provider", "mode", "reason")))
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in WORST_FIRST[::-1])
    print(f"{len(rows)} cells of a GPU: {counts}; {evidence.append(rows, options.out)}")
    return gravest([*codes, *(EXIT[verdict] for verdict in verdicts)])


if __name__ == "__main__":
    sys.exit(main())
