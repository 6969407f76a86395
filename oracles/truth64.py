# SPDX-License-Identifier: Apache-2.0
"""Oracle: what ops mean, computed in float64 by formulas of our own, with nothing but numpy.

`python -m oracles.truth64 JOB OUT`; oracles/op_job.py says what JOB and OUT are. Floats of JOB are
taken as they are stored and widened; those of OUT are float64, unrounded. The lane `float32` is the
same formulas on float32, what an implementation that sums in it must be granted. The formulas are
in truth64_ops.py and its siblings, and are written nowhere else.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file

from oracles import (
    truth64_activation,
    truth64_gdn,
    truth64_moe,
    truth64_ops,
    truth64_sampler,
)

VERSION = "1"
LANE, NARROW = "float64", "float32"
TRUTH = truth64_ops.TRUTH
for _sibling in (truth64_activation, truth64_gdn, truth64_moe, truth64_sampler):
    assert _sibling.TRUTH is TRUTH, f"the formulas of {_sibling.__name__} are in another table"
STORED = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "I64": "<i8",
    "I32": "<i4",
    "U8": "u1",
    "BOOL": "?",
}
"""Element types of safetensors as numpy reads their bits."""


def available() -> Literal[True] | str:
    """Always: numpy is all it needs."""
    return True


def widened(dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    """A stored tensor: floats as float64, which holds each exactly, others as they are."""
    values = np.frombuffer(data, STORED[dtype]).reshape(shape)
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float64) if dtype.endswith(("F64", "F32", "F16")) else values


def read_job(path: Path) -> tuple[list[dict[str, Any]], dict[str, np.ndarray]]:
    """The cases of a job and its tensors."""
    data = path.read_bytes()
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    cases = json.loads(header.pop("__metadata__")["job"])
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        raw = data[8 + size + first : 8 + size + last]
        tensors[name] = widened(entry["dtype"], entry["shape"], raw)
    return cases, tensors


def answer(
    cases: list[dict[str, Any]], tensors: dict[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tensors of OUT, content of `answer`)."""
    outputs: dict[str, np.ndarray] = {}
    told: dict[str, Any] = {}
    for case in cases:
        name, compute = case["id"], TRUTH.get(case["op"])
        if compute is None:
            told[name] = {"callable": "", "lane": "", "repeat": True}
            told[name]["error"] = f"truth64 has no op {case['op']}"
            continue
        called = f"{compute.__module__}.{compute.__name__}"
        told[name] = {"callable": called, "lane": LANE, "repeat": True}
        try:
            # Infinities among the inputs are meant.
            with np.errstate(all="ignore"):
                found = compute(**_arguments(case, tensors))
                again = compute(**_arguments(case, tensors))
        except Exception as error:
            told[name]["error"] = f"{type(error).__name__}: {error}"
            continue
        told[name]["repeat"] = all(found[key].tobytes() == again[key].tobytes() for key in found)
        outputs |= {f"{name}/out.{k}": np.ascontiguousarray(v) for k, v in found.items()}
        for key, value in _narrow(compute, _arguments(case, tensors)).items():
            outputs[f"{name}/lane.{NARROW}.{key}"] = np.ascontiguousarray(value)
    return outputs, {"oracle": describe(), "cases": told}


def _narrow(compute: Callable[..., Any], given: dict[str, Any]) -> dict[str, np.ndarray]:
    """The float outputs of float32 arithmetic, as float64."""
    small = {
        name: value.astype(np.float32) if _is_float(value) else value
        for name, value in given.items()
    }
    with np.errstate(all="ignore"):
        found = compute(**small)
    return {name: value.astype(np.float64) for name, value in found.items() if _is_float(value)}


def _is_float(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind == "f"


def describe() -> dict[str, Any]:
    """What computed, for the golden: nothing that differs from run to run."""
    return {
        "name": "truth64",
        "version": VERSION,
        "torch": "none",
        "numpy": np.__version__,
        "device": "cpu",
        "threads": 1,
        "command": "python -m oracles.truth64",
        "reps": 2,
    }


def _arguments(case: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in case["args"].items():
        named = isinstance(value, dict) and set(value) == {"tensor"}
        found[name] = tensors[value["tensor"]].copy() if named else value
    return found


def main() -> int:
    """The command line of an oracle: 0 answered; it is available everywhere."""
    parser = argparse.ArgumentParser(description="Answers jobs of ops as truth64.")
    parser.add_argument("--available", action="store_true", help="only say whether it can run")
    parser.add_argument("job", type=Path, nargs="?")
    parser.add_argument("out", type=Path, nargs="?")
    args = parser.parse_args()
    if args.available:
        print(f"truth64 {VERSION}")
        return 0
    if args.job is None or args.out is None:
        parser.error("give JOB and OUT")
    outputs, told = answer(*read_job(args.job))
    save_file(outputs, str(args.out), {"answer": json.dumps(told, sort_keys=True)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
