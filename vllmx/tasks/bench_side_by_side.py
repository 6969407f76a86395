# SPDX-License-Identifier: Apache-2.0
"""`vllmx bench side-by-side`: ours and upstream on one device, in turn, in one run.

Every engine loads the same checkpoint folder once and stays; then each row goes round the engines
(A B A B), greedy over random token ids, so that whatever disturbs the machine disturbs all alike.
A row's ratio is ours over the better of upstream's modes. How many answers are equal is told and
decides nothing: upstream's own modes part ways at near ties.
"""

from __future__ import annotations

import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.platform import child_environment
from vllmx.tasks.bench_floor import Limits, floor_seconds, measure_limits, work_of

CHILD = Path(__file__).with_name("bench_child.py")
ROW = re.compile(r"(\d+)x(\d+)\+(\d+)")
MODES = {"in-process": "0", "multiprocessing": "1"}
"""Upstream's mode -> VLLM_ENABLE_V1_MULTIPROCESSING in its process."""
OURS = "vllmx"


@dataclass
class Child:
    """A process with one loaded engine."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    started: float
    ready_s: float = 0.0
    told: dict[str, float] = field(default_factory=dict)

    def wait_ready(self) -> None:
        """Until it has answered with its first token; UserError with the end of its log if not."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.ready_s = time.perf_counter() - self.started
        if not line:
            raise UserError(f"bench: {self.name} did not start: {self.last_words()}")
        self.told = json.loads(line)["ready"]

    def timed(self, work: dict[str, int]) -> tuple[float, list[list[int]]]:
        """(seconds, token ids of each answer) of one batch."""
        assert self.process.stdin is not None and self.process.stdout is not None
        line = ""
        with suppress(BrokenPipeError):  # it has died since; its log says of what
            print(json.dumps(work), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        if not line:
            raise UserError(f"bench: {self.name} died at {work}: {self.last_words()}")
        answer = json.loads(line)
        return answer["seconds"], answer["tokens"]

    def last_words(self) -> str:
        """The last lines of its log that say anything."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        told = [line.strip() for line in lines if line.strip() and "Warning" not in line]
        errors = [line for line in told if "Error" in line]
        return " / ".join((errors or told)[-2:]) or "it said nothing"

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start(
    name: str, python: str, engine: str, options: dict[str, Any], folder: Path, **env: str
) -> Child:
    """Start a child; its prints go to a file in `folder`."""
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(
            [python, str(CHILD), engine, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=child_environment(**env),
        )
    return Child(name, process, log, time.perf_counter())


def options_of(config: RunConfig) -> dict[str, Any]:
    """What an engine is told: arguments of `LLM` that upstream's has, too."""
    model, scheduler, cache = config.model, config.scheduler, config.cache
    options = {
        "model": model.model,
        "load_format": config.load.load_format,
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "skip_tokenizer_init": True,
        "seed": model.seed,
    }
    return {key: value for key, value in options.items() if value is not None}


def rows_of(config: RunConfig) -> list[tuple[int, int, int]]:
    """(batch, input_len, output_len) of bench.rows; UserError for what is no row."""
    rows = []
    for text in config.bench.rows:
        match = ROW.fullmatch(text)
        if match is None:
            raise UserError(f"bench.rows: {text!r} is not BATCHxINPUT+OUTPUT, as in 32x16+256.")
        rows.append((int(match[1]), int(match[2]), int(match[3])))
    return rows


def measure_side_by_side(config: RunConfig) -> dict[str, Any]:
    """Seconds of every row, engine and round, and what they come to."""
    bench = config.bench
    options, rows = options_of(config), rows_of(config)
    described = Path(config.model.model or "") / "config.json"
    if not config.model.model or not described.is_file():
        raise UserError(
            "bench side-by-side: give model=FOLDER, a checkpoint that both engines can load: "
            "config.json and safetensors. Named models are GGUF files, which it does not take."
        )
    options["model"] = str(described.parent.resolve())
    hf_config = json.loads(described.read_text(encoding="utf-8"))
    limits = None
    if on_gpu():
        limits = measure_limits()
        free_device_memory()
    with tempfile.TemporaryDirectory(prefix="vllmx-bench-") as scratch:
        children = _started(config, options, Path(scratch))
        try:
            found = [
                _row(children, row, bench.num_iters_warmup, bench.num_iters, hf_config)
                for row in rows
            ]
        finally:
            for child in children:
                child.close()
    for row in found:
        row |= _judged(row, hf_config, limits)
        print(f"vllmx: {_words(row)}", file=sys.stderr)
    return {
        "model": Path(options["model"]).name,
        "options": {key: value for key, value in options.items() if key != "model"},
        "limits": None if limits is None else vars(limits),
        "environment": environment(),
        "start": {child.name: {"ready_s": child.ready_s, **child.told} for child in children},
        "rows": found,
    }


def _started(config: RunConfig, options: dict[str, Any], folder: Path) -> list[Child]:
    """Ours and upstream in each of its modes, loaded one after the other."""
    bench = config.bench
    if bench.upstream_python is None:
        raise UserError(
            "bench side-by-side: give bench.upstream_python=PATH, an interpreter that has vllm "
            "(`nox -s oracle` makes one for a CPU)."
        )
    if shutil.which(bench.upstream_python) is None:
        raise UserError(
            f"bench.upstream_python={bench.upstream_python}: there is no such program; give the "
            "interpreter that has vllm."
        )
    if not bench.upstream_modes or set(bench.upstream_modes) - MODES.keys():
        raise UserError(
            f"bench.upstream_modes={bench.upstream_modes}: name some of {', '.join(MODES)}."
        )
    children = [start(OURS, sys.executable, OURS, options, folder)]
    try:
        children[0].wait_ready()
        for mode in bench.upstream_modes:
            env = {"VLLM_ENABLE_V1_MULTIPROCESSING": MODES[mode], "HF_HUB_OFFLINE": "1"}
            name = f"upstream {mode}"
            children.append(start(name, bench.upstream_python, "vllm", options, folder, **env))
            children[-1].wait_ready()
    except UserError:
        for child in children:
            child.close()
        raise
    return children


def _row(
    children: list[Child],
    row: tuple[int, int, int],
    warmups: int,
    rounds: int,
    hf_config: dict[str, Any],
) -> dict[str, Any]:
    """Times of one row, engine after engine, round after round."""
    batch, input_len, output_len = row
    seconds: dict[str, list[float]] = {child.name: [] for child in children}
    equal = {child.name: 0 for child in children[1:]}
    for number in range(-warmups, rounds):
        work = {
            "batch": batch,
            "input_len": input_len,
            "output_len": output_len,
            "seed": abs(number),
            "vocab": hf_config["vocab_size"],
        }
        ours: list[list[int]] = []
        for child in children:
            took, tokens = child.timed(work)
            if number >= 0:
                seconds[child.name].append(took)
                if child.name == OURS:
                    ours = tokens
                else:
                    equal[child.name] += sum(a == b for a, b in zip(ours, tokens, strict=True))
    return {
        "row": f"{batch}x{input_len}+{output_len}",
        "seconds": seconds,
        "equal_answers": equal,
        "answers": batch * rounds,
    }


def _judged(
    row: dict[str, Any], hf_config: dict[str, Any], limits: Limits | None
) -> dict[str, Any]:
    """Tokens a second of both, their ratio, and the share of the device's floor that ours reach."""
    match = ROW.fullmatch(row["row"])
    assert match is not None
    batch, input_len, output_len = (int(part) for part in match.groups())
    # A mixed row is told in all tokens, a decode row in those that come out.
    counted = output_len if input_len <= 32 else input_len + (output_len if output_len > 1 else 0)
    medians = {name: statistics.median(times) for name, times in row["seconds"].items()}
    others = {name: took for name, took in medians.items() if name != OURS}
    best = min(others, key=lambda name: others[name])
    work = work_of(hf_config)
    fraction = None
    if limits is not None and work is not None:
        head = 2 * hf_config["hidden_size"] * hf_config["vocab_size"]
        floor = floor_seconds(work, head, limits, batch, input_len, output_len)
        fraction = round(floor / medians[OURS], 4)
    return {
        "ours": round(batch * counted / medians[OURS], 1),
        "upstream": round(batch * counted / others[best], 1),
        "upstream_mode": best,
        "ratio": round(others[best] / medians[OURS], 4),
        "floor_fraction": fraction,
        "repeats": len(row["seconds"][OURS]),
    }


def _words(row: dict[str, Any]) -> str:
    share = row["floor_fraction"]
    told = "" if share is None else f", {share:.0%} of the floor"
    return (
        f"{row['row']}: {row['ours']:,.0f} tok/s, upstream {row['upstream']:,.0f} "
        f"({row['upstream_mode']}): {row['ratio']:.2f}x{told}"
    )


def on_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def free_device_memory() -> None:
    """Give back what torch keeps for later: the engines are other processes."""
    import torch

    torch.cuda.empty_cache()


def environment() -> dict[str, str]:
    """What ran where."""
    import platform
    from importlib import metadata

    import torch

    from vllmx import __version__

    found = {"vllmx": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "vllm"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found
