# SPDX-License-Identifier: Apache-2.0
"""The truth of cases: what the oracle `truth64` answers, asked as a process like any other.

What was asked once is remembered for as long as this process lives, and no longer: a truth that
lay in a file could be that of another formula.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .compare import compare_exact, golden_fault
from .digests import canonical
from .dtypes import Array, array
from .golden import GoldenError
from .oracle_process import Answer, Question, ask

ORACLE = "truth64"
ROOT = Path(__file__).resolve().parents[1]
BATCH_BYTES = 64 * 2**20
"""Inputs that one process of the oracle is given at most, unless one case has more."""

CAP = 4.0
CAPS = {
    # 1 + erf(x) cancels where the gate is nearly shut.
    "gelu_and_mul": 16.0,
    # exp(score - logsumexp), the difference rounded before it is raised.
    "topk_softmax": 8.0,
    # Sums in bfloat16 or float32 over many elements, probabilities rounded to the dtype.
    "attention": 16.0,
    "gemm": 16.0,
    "moe": 16.0,
    # Each token is added to what all before it left; keys that are alike add up their errors.
    "scan": 16.0,
    # Angles of 8191 radians in float32 are off by 2^-11.
    "table": 4096.0,
}
"""By op or class of limits; see cap_of."""

Outputs = dict[str, np.ndarray]
_known: dict[str, Outputs | GoldenError] = {}


def truth_of(op: str, arguments: Mapping[str, Any]) -> Outputs | None:
    """The outputs in float64 (integers as they are); None for an op whose meaning is its golden.

    GoldenError where the oracle can't answer.
    """
    if not symbols_of(op):
        return None
    key = _key(op, arguments)
    if key not in _known:
        _remember(ask(ORACLE, [Question(key, op, dict(arguments))]))
    found = _known[key]
    if isinstance(found, GoldenError):
        raise found
    return found


def prepare(cases: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Ask the truth of many (op, arguments) with few processes; GoldenError as `truth_of`, but
    what the oracle says of one case alone is kept for when it is asked for."""
    waiting: dict[str, Question] = {}
    size = 0
    for op, arguments in cases:
        key = _key(op, arguments) if symbols_of(op) else ""
        if not key or key in _known or key in waiting:
            continue
        waiting[key] = Question(key, op, dict(arguments))
        size += sum(v.data.nbytes for v in arguments.values() if isinstance(v, Array))
        if size >= BATCH_BYTES:
            _remember(ask(ORACLE, waiting.values()))
            waiting, size = {}, 0
    if waiting:
        _remember(ask(ORACLE, waiting.values()))


def cap_of(op: str, kind: str) -> float:
    """How many units in the last place a golden of an op may be off by, root mean square."""
    return CAPS.get(op, CAPS.get(kind, CAP))


def contradiction(
    name: str, golden: Array, truth: Outputs | None, exact: bool, cap: float, dtype: str
) -> str:
    """How the golden's output `name` of a case in `dtype` and the truth contradict each other;
    empty if they agree. A wrong truth would widen every limit, as those are multiples of what the
    golden is off by."""
    if exact:
        if truth is None:
            return ""
        if golden.is_float:
            same = compare_exact(golden, array(truth[name], golden.dtype)).ok
        else:
            same = truth[name].shape == golden.shape and not (truth[name] != golden.data).any()
        return "" if same else f"{name} is not the truth"
    if truth is None:
        return f"{name} needs a truth"
    # An output that is wider than its case comes from what was rounded to the case's dtype.
    fault = golden_fault(golden, truth[name], cap, dtype)
    return f"{name}: {fault}" if fault else ""


def symbols_of(op: str) -> list[str]:
    """The symbols of the truth, for the closure; none for an op without one."""
    return [_formulas()[op]] if op in _formulas() else []


@functools.cache
def _formulas() -> dict[str, str]:
    """Op -> symbol of every function that is decorated with `truth`; read, not imported."""
    found = {}
    for path in sorted((ROOT / "oracles").glob("truth64_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(mark, ast.Name) and mark.id == "truth" for mark in node.decorator_list
            ):
                found[node.name] = f"oracles/{path.name}:{node.name}"
    return found


def _key(op: str, arguments: Mapping[str, Any]) -> str:
    told = {k: v.sha256 if isinstance(v, Array) else v for k, v in arguments.items()}
    return hashlib.sha256(canonical([op, told])).hexdigest()


def _remember(answers: Iterable[Answer]) -> None:
    for answer in answers:
        fault = answer.told.get("error")
        if fault is None and not answer.told["repeat"]:
            fault = "a second call gave other bits"
        outputs = {name: value.data for name, value in answer.outputs.items()}
        _known[answer.id] = GoldenError(f"{ORACLE}: {fault}") if fault else outputs
