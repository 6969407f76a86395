# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity record [select=...] [oracle=...] [check=true]`: ask the oracles, write goldens.

`select` has prefixes of op.NAME/CASE, model.NAME, text.KIND/CASE and schedule.TRACE; without it all
but models are recorded. Texts and traces: record_specs.py. Each case of an op goes to the oracle
that op_table.py names for it, as a process of its own. An answer becomes a golden only if a second
call gave the same bits, if it is no further from the float64 truth than a few roundings, and if
plainly wrong copies of it would be refused. With `check` nothing is written: exit code 1 if a
golden or its floor would change.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig

from . import calibrate, golden, policy
from .compare import compare_exact, compare_float, golden_fault, teeth
from .dtypes import Array, array
from .golden import GoldenError
from .inputs import Arguments, Case
from .op_table import EXACT, OPS, OpEntry, golden_name
from .oracle_process import Answer, OracleBlocked, Question, ask
from .record_specs import record_schedule, record_text
from .selection import by_kind
from .truths import truth_of


@dataclass(frozen=True)
class Recorded:
    """One case with the oracle's answer."""

    entry: OpEntry
    case: Case
    dtype: str
    arguments: Arguments
    answer: Answer

    @property
    def golden(self) -> str:
        """Path under goldens/ops."""
        return golden_name(self.entry.name, self.case.name, self.dtype)

    def data(self) -> bytes:
        """The bytes of the golden."""
        inputs = {k: v for k, v in self.arguments.items() if isinstance(v, Array)}
        outputs = {f"out.{k}": v for k, v in self.answer.outputs.items()}
        told = {f"in.{k}": golden.describe(v, False) for k, v in inputs.items()}
        told |= {k: golden.describe(v, True) for k, v in outputs.items()}
        case = {k: v for k, v in self.answer.told.items() if k in ("callable", "lane")}
        facts = {
            "schema": golden.SCHEMA,
            "kind": "op",
            "feature": self.entry.feature,
            "case": self.case.name,
            "dtype": self.dtype,
            "cells": list(self.case.cells),
            "class": self.entry.kind,
            "args": {k: v for k, v in self.arguments.items() if k not in inputs},
            "mutates": list(self.entry.mutates),
            "tensors": told,
            "inputs": "philox, parity/inputs.py",
            "oracle": {**self.answer.oracle, **case},
            "license": "generated",
        }
        return golden.pack(facts, outputs)

    def fault(self, folder: Path | None = None) -> str:
        """Why this can't be a golden, or, with a folder, isn't the one there; empty if it can."""
        if error := self.answer.told.get("error"):
            return f"the oracle fails: {error}"
        if not self.answer.told["repeat"]:
            return "a second call gave other bits"
        wanted = [n for n in self.entry.outputs if n in self.answer.outputs]
        if not wanted or set(wanted) != set(self.answer.outputs):
            return f"outputs {sorted(self.answer.outputs)}, not {self.entry.outputs}"
        if folder is not None:
            path = folder / self.golden
            same = path.is_file() and path.read_bytes() == self.data()
            return "" if same else "the oracle gives another golden now"
        return next((f for name in wanted if (f := self._output_fault(name))), "")

    def _output_fault(self, name: str) -> str:
        value = self.answer.outputs[name]
        if value.data.size == 0:
            return f"{name} is empty"
        truth = truth_of(self.entry.name, self.arguments)
        if self.entry.kind_of(name) == EXACT:
            if truth is not None and value.is_float:
                unlike = not compare_exact(value, array(truth[name], value.dtype)).ok
                return f"{name} is not the truth" if unlike else ""
            if truth is not None and (truth[name] != value.data).any():
                return f"{name} is not the truth"
            return self._toothless(name, None)
        if truth is None:
            return f"{name} needs a truth"
        # An output that is wider than its case comes from what was rounded to the case's dtype.
        fault = golden_fault(value, truth[name], self._cap(), self.dtype)
        return f"{name}: {fault}" if fault else self._toothless(name, truth)

    def _cap(self) -> float:
        return CAPS.get(self.entry.name, CAPS.get(self.entry.kind, CAP))

    def _toothless(self, name: str, truth: dict[str, Any] | None) -> str:
        value = self.answer.outputs[name]
        if truth is None:
            caught = teeth(value, lambda copy: compare_exact(copy, value))
        else:
            limits = policy.load().limits(self.entry.kind, self.entry.name, "*", self.dtype)
            caught = teeth(value, lambda copy: compare_float(copy, value, truth[name], limits))
        missed = sorted(copy for copy, seen in caught.items() if not seen)
        if missed or not caught:
            return f"{name} would let {', '.join(missed) or 'anything'} pass"
        return ""

    def floor(self) -> dict[str, Any]:
        """The golden's entry in floors.json."""
        data = self.data()
        lanes = calibrate.measure(self.entry.name, self.arguments, self.answer.lanes)
        sha = golden.unpack(data).sha256
        return {"golden_sha": sha, "repeat": self.answer.told["repeat"], "lanes": lanes}


WORST_FIRST = (2, 3, 1)
"""Exit codes of several kinds: a golden that can't be one, an oracle that is not here, a change."""
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
"""How many units in the last place a golden may be off by, root mean square."""


@dataclass
class Answers:
    """What the oracles said, and why some said nothing."""

    answers: list[Recorded] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    blocked: bool = False


def ask_all(select: str | None = None, oracle: str | None = None) -> Answers:
    """Every selected case, asked of `oracle` or of the one named for its op."""
    wanted = [word.strip() for word in select.split(",")] if select else [""]
    by_oracle: dict[str, list[tuple[OpEntry, Case, str, Arguments]]] = defaultdict(list)
    for entry in OPS.values():
        if oracle is not None and oracle != entry.oracle:
            continue
        for case in entry.cases:
            names = (f"{entry.feature}/{case.name}", f"{entry.name}/{case.name}")
            if any(name.startswith(word) for name in names for word in wanted):
                by_oracle[entry.oracle] += [
                    (entry, case, dtype, case.arguments(dtype)) for dtype in case.dtypes
                ]
    found = Answers()
    for name, cases in by_oracle.items():
        questions = [
            Question(golden_name(entry.name, case.name, dtype), entry.name, arguments)
            for entry, case, dtype, arguments in cases
        ]
        try:
            answers = ask(name, questions)
        except GoldenError as error:
            found.reasons.append(str(error))
            found.blocked |= isinstance(error, OracleBlocked)
            continue
        found.answers += [Recorded(*case, answer) for case, answer in zip(cases, answers)]
    return found


def record(
    select: str | None = None,
    oracle: str | None = None,
    folder: Path = golden.OPS,
    check: bool = False,
) -> int:
    """Write goldens, their index and their floors; returns the exit code of the verb."""
    answers = ask_all(select, oracle)
    floors, changed, refused = {}, 0, 0
    known = calibrate.Floors(folder).entries
    for recorded in answers.answers:
        if fault := recorded.fault():
            print(f"{recorded.golden}: refused: {fault}")
            refused += 1
            continue
        data, path = recorded.data(), folder / recorded.golden
        floor = floors[recorded.golden] = recorded.floor()
        if not path.is_file() or path.read_bytes() != data:
            changed += 1
            print(f"{recorded.golden}: {'differs' if path.is_file() else 'new'}, {len(data)} bytes")
            if not check:
                golden.write(path, data)
        elif check and floor != known.get(recorded.golden):
            changed += 1
            print(f"{recorded.golden}: another floor, the limits are multiples of it")
    if floors and not check:
        calibrate.write(floors, folder)
        golden.write_index(folder)
    for reason in answers.reasons:
        print(reason)
    print(f"{len(floors)} goldens, {changed} changed, {refused} refused")
    if answers.blocked:
        return 3
    if refused or answers.reasons or not floors:
        return 2
    return 1 if check and changed else 0


def record_models(select: str | None, check: bool, folder: Path = golden.MODELS) -> int:
    """Record the selected models; returns the exit code of the verb."""
    from .model_golden import record as ask_model
    from .model_table import LANES, MODELS

    code = 0
    for entry in MODELS.values():
        words = [word.strip() for word in (select or "").split(",")]
        if not any(n.startswith(w) for n in (entry.feature, entry.name) for w in words):
            continue
        try:
            answers = ask_model(entry, list(LANES))
        except GoldenError as error:
            print(error)
            code = max(code, 3 if isinstance(error, OracleBlocked) else 2)
            continue
        for lane, data in answers.items():
            path = folder / entry.golden(lane)
            same = path.is_file() and path.read_bytes() == data
            print(f"models/{entry.golden(lane)}: {'same' if same else 'new'}, {len(data)} bytes")
            if check:
                code = max(code, 0 if same else 1)
            elif not same:
                golden.write(path, data, golden.MODEL_MAX_BYTES)
    if not check:
        golden.write_index(folder)
    return code


def run(config: RunConfig) -> int:
    """The verb: every kind that `select` names; the gravest exit code."""
    parity = config.parity
    # An oracle of ops says nothing of the other kinds; models take an hour, so they are named.
    kinds = ("ops",) if parity.oracle else ("ops", "schedule", "text")
    codes = []
    for kind, select in by_kind(parity.select, kinds).items():
        if kind == "ops":
            codes.append(record(select, parity.oracle, check=parity.check))
        elif kind == "models":
            codes.append(record_models(select, parity.check))
        elif kind == "text":
            codes.append(record_text(select, parity.check))
        else:
            codes.append(record_schedule(select, parity.check))
    return next((code for code in WORST_FIRST if code in codes), 0)
