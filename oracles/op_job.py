# SPDX-License-Identifier: Apache-2.0
"""How an oracle of ops is asked: one file in, one file out, both safetensors.

JOB has the metadata key `job`, JSON: a list of {"id", "op", "args"}, where an argument is either a
plain value or {"tensor": name}, a tensor of the file. OUT gets the outputs as `ID/out.NAME`, those
of the oracle's other lanes as `ID/lane.LANE.NAME`, and the metadata key `answer`, JSON: `oracle`
(what computed), and by id `callable`, `error` (why an op could not be asked) and `repeat` (whether
a second call gave the same bits). Used by every oracle of ops; knows nothing of any of them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
Lanes = dict[str, Callable[..., Tensors]]
"""Lane -> function of an op's arguments that returns its outputs; the first is the golden's."""


class Oracle:
    """A source of truth for ops: its name and, by op, the lanes it can compute it in."""

    def __init__(
        self, name: str, version: str, available: Callable[[], Literal[True] | str]
    ) -> None:
        self.name = name
        self.version = version
        self.available = available
        self.ops: dict[str, Lanes] = {}
        self.callables: dict[str, str] = {}

    def lane(self, op: str, lane: str, upstream: str) -> Callable[[Callable[..., Tensors]], Any]:
        """Decorator of a function that computes `op`; `upstream` names what it calls."""

        def register(fn: Callable[..., Tensors]) -> Callable[..., Tensors]:
            if not self.ops.setdefault(op, {}):
                self.callables[op] = upstream
            self.ops[op][lane] = fn
            return fn

        return register

    def describe(self) -> dict[str, Any]:
        """What computed, for the golden: nothing that differs from run to run."""
        return {
            "name": self.name,
            "version": self.version,
            "torch": torch.__version__,
            "numpy": _numpy_version(),
            "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
            "threads": torch.get_num_threads(),
            "command": f"python -m oracles.{self.name}",
            "reps": 2,
        }


def _numpy_version() -> str:
    import numpy

    return numpy.__version__


def read_job(path: Path) -> tuple[list[dict[str, Any]], Tensors]:
    """The cases of a job and its tensors."""
    with safe_open(str(path), "pt") as file:
        cases = json.loads(file.metadata()["job"])
        return cases, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def arguments(case: dict[str, Any], tensors: Tensors) -> dict[str, Any]:
    """Arguments of a case, tensors as copies of their own."""
    found: dict[str, Any] = {}
    for name, value in case["args"].items():
        named = isinstance(value, dict) and set(value) == {"tensor"}
        found[name] = tensors[value["tensor"]].clone() if named else value
    return found


def answer(oracle: Oracle, cases: list[dict[str, Any]], tensors: Tensors) -> tuple[Tensors, dict]:
    """(tensors of OUT, content of `answer`)."""
    outputs: Tensors = {}
    told: dict[str, Any] = {}
    for case in cases:
        name = case["id"]
        told[name] = {"callable": oracle.callables.get(case["op"], ""), "lane": "", "repeat": True}
        lanes = oracle.ops.get(case["op"])
        if not lanes:
            told[name]["error"] = f"{oracle.name} has no op {case['op']}"
            continue
        for number, (lane, compute) in enumerate(lanes.items()):
            try:
                found = compute(**arguments(case, tensors))
                again = compute(**arguments(case, tensors)) if number == 0 else found
            except Exception as error:
                if number == 0:
                    told[name]["error"] = f"{type(error).__name__}: {error}"
                    break
                continue  # another lane need not take every case
            if number == 0:
                told[name] |= {"lane": lane, "repeat": _same_bits(found, again)}
            prefix = f"{name}/out." if number == 0 else f"{name}/lane.{lane}."
            outputs |= {f"{prefix}{key}": value.contiguous() for key, value in found.items()}
    return outputs, {"oracle": oracle.describe(), "cases": told}


def _same_bits(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(a[key].contiguous().view(torch.uint8), b[key].contiguous().view(torch.uint8))
        for key in a
    )


def main(oracle: Oracle) -> int:
    """The command line of an oracle: 0 answered, 2 not available here (the reason on stderr)."""
    parser = argparse.ArgumentParser(description=f"Answers jobs of ops as {oracle.name}.")
    parser.add_argument("--available", action="store_true", help="only say whether it can run")
    parser.add_argument("job", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    ready = oracle.available()
    if ready is not True:
        print(ready, file=sys.stderr)
        return 2
    if args.available:
        print(f"{oracle.name} {oracle.version}")
        return 0
    if args.job is None or args.out is None:
        parser.error("give JOB and OUT")
    # One thread: the order of a sum must not depend on the machine.
    torch.set_num_threads(1)
    outputs, told = answer(oracle, *read_job(args.job))
    save_file(outputs, str(args.out), {"answer": json.dumps(told, sort_keys=True)})
    return 0
