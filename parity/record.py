# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity record [select=...] [oracle=...] [check=true]`: ask the oracles, write goldens.

`select` has prefixes of op.NAME/CASE, model.NAME, text.KIND/CASE and schedule.TRACE; without it all
but models are recorded. Texts and traces: record_specs.py. Each case of an op goes to the oracle
that op_table.py names for it, as a process of its own (`truth64` where nothing else computes it:
then the golden is the truth, rounded once). An answer becomes a golden only if a second call gave
the same bits, if it is no further from the float64 truth than a few roundings, and if plainly wrong
copies of it would be refused. With `check` nothing is written: exit code 1 if a golden or its floor
would change.
"""

from __future__ import annotations

import datetime as dt
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllmx.config import RunConfig

from . import calibrate, golden, gpu_models, policy
from .compare import compare_exact, compare_float, teeth
from .dtypes import Array, array
from .golden import GoldenError
from .inputs import Arguments, Case
from .op_table import EXACT, GPU_OPS, LAYOUTS, OPS, OpEntry, golden_name
from .oracle_process import Answer, OracleBlocked, Question, ask
from .record_specs import record_schedule, record_text
from .replay import TimeBox
from .selection import by_kind, check_oracle, check_words, golden_names, op_names
from .truths import ORACLE as TRUTH
from .truths import cap_of, contradiction, prepare, truth_of

GPU_ORACLE = "vllm_gpu_ops"
"""Asked for by name only (`oracle=vllm_gpu_ops`): it needs a GPU and has a folder of its own."""


Asked = tuple[OpEntry, Case, str, Arguments]
AVX512 = {("chunk_gated_delta_rule", "bf16")}
"""Op and dtype whose kernel of upstream's multiplies with AVX-512 and has nothing for less."""


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
        if self.entry.mutates:
            facts["layout"] = {name: LAYOUTS[name] for name in self.entry.mutates}
        return golden.pack(facts, outputs)

    def fault(self, folder: Path | None = None) -> str:
        """Why this can't be a golden, or, with a folder, isn't the one there; empty if it can."""
        if error := self.answer.told.get("error"):
            return f"{ORACLE_FAILS}{error}"
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
        exact, cap = self.entry.kind_of(name) == EXACT, cap_of(self.entry.name, self.entry.kind)
        if fault := contradiction(name, value, truth, exact, cap, self.dtype):
            return fault
        return self._toothless(name, None if exact else truth)

    def _toothless(self, name: str, truth: dict[str, Any] | None) -> str:
        value = self.answer.outputs[name]
        if truth is None:
            caught = teeth(value, lambda copy: compare_exact(copy, value))
        else:
            limits = policy.load().limits(self.entry.kind, self.entry.name, "*", self.dtype, "cpu")
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


ORACLE_FAILS = "the oracle fails: "
WORST_FIRST = (2, 3, 1)
TOGETHER = 4
"""Models that a check asks of one process of an oracle, which takes its time to start."""
"""Exit codes of several kinds: a golden that can't be one, an oracle that is not here, a change."""


@dataclass
class Answers:
    """What the oracles said, and why some said nothing."""

    answers: list[Recorded] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    blocked: bool = False


def ask_all(
    select: str | None = None,
    oracle: str | None = None,
    ops: Mapping[str, OpEntry] | None = None,
) -> Answers:
    """Every selected case of `ops` (None: all), asked of `oracle` or of the one its op names."""
    wanted = [word.strip() for word in select.split(",")] if select else [""]
    by_oracle: dict[tuple[str, bool], list[Asked]] = defaultdict(list)
    for entry in (OPS if ops is None else ops).values():
        if oracle is not None and oracle != entry.oracle:
            continue
        for case in entry.cases:
            names = (f"{entry.feature}/{case.name}", f"{entry.name}/{case.name}")
            if any(name.startswith(word) for name in names for word in wanted):
                for dtype in case.dtypes:
                    asked = (entry, case, dtype, case.arguments(dtype))
                    by_oracle[entry.oracle, (entry.name, dtype) in AVX512].append(asked)
    found = Answers()
    for (name, wide), cases in by_oracle.items():
        questions = [
            Question(golden_name(entry.name, case.name, dtype), entry.name, arguments)
            for entry, case, dtype, arguments in cases
        ]
        try:
            answers = ask(name, questions, wide)
        except GoldenError as error:
            found.reasons.append(str(error))
            found.blocked |= isinstance(error, OracleBlocked)
            continue
        if name == TRUTH:
            answers = [rounded(case[0], case[2], answer) for case, answer in zip(cases, answers)]
        found.answers += [Recorded(*case, answer) for case, answer in zip(cases, answers)]
    prepare((recorded.entry.name, recorded.arguments) for recorded in found.answers)
    return found


def rounded(entry: OpEntry, dtype: str, answer: Answer) -> Answer:
    """The float64 truth as a golden has it: rounded once, to the dtype of the case."""

    def once(outputs: dict[str, Array]) -> dict[str, Array]:
        return {
            name: array(v.data, "f32" if name in entry.wide else dtype) if v.is_float else v
            for name, v in outputs.items()
        }

    lanes = {lane: once(outputs) for lane, outputs in answer.lanes.items()}
    return replace(answer, outputs=once(answer.outputs), lanes=lanes)


def record(
    select: str | None = None,
    oracle: str | None = None,
    folder: Path = golden.OPS,
    check: bool = False,
    ops: Mapping[str, OpEntry] | None = None,
) -> int:
    """Write goldens, their index and their floors; returns the exit code of the verb.

    What kernels of a GPU (`ops` is GPU_OPS) don't take is written down with their words: nothing
    is asked of a golden then. Every op of the CPU's lane takes its cases.
    """
    answers = ask_all(select, oracle, ops)
    floors, changed, refused = {}, 0, 0
    declined: dict[str, str] = {}
    known = calibrate.Floors(folder).entries
    for recorded in answers.answers:
        fault = recorded.fault()
        if fault.startswith(ORACLE_FAILS) and ops is not None:
            declined[recorded.golden] = fault.removeprefix(ORACLE_FAILS)
            continue
        if fault:
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
        if ops is not None:
            golden.write_declined(folder, {r.golden for r in answers.answers}, declined)
        calibrate.write(floors, folder)
        golden.write_index(folder)
    for reason in answers.reasons:
        print(reason)
    if not (answers.answers or answers.reasons):
        print(f"no case of {oracle or 'any oracle'} is called {select}")
    print(f"{len(floors)} goldens, {changed} changed, {refused} refused")
    if answers.blocked:
        return 3
    if refused or answers.reasons or not floors:
        return 2
    return 1 if check and changed else 0


def record_models(
    select: str | None,
    check: bool,
    folder: Path = golden.MODELS,
    deadline: float = math.inf,
    day: int = 0,
) -> int:
    """Record the selected models; returns the exit code of the verb.

    With `check` they are asked few at a time until `deadline`, of time.monotonic, and another
    `day` begins with others, so that a time box that is too short for all still comes by each.
    """
    from .model_golden import record as ask_models
    from .model_table import chosen

    code = 0
    entries = chosen(select)
    box, groups = TimeBox(deadline), [entries]
    if check:
        groups = [entries[at : at + TOGETHER] for at in range(0, len(entries), TOGETHER)]
        first = day % max(len(groups), 1)
        groups = groups[first:] + groups[:first]
    for entry, answers in (told for group in box.take(groups) for told in ask_models([*group])):
        if isinstance(answers, GoldenError):
            print(f"{entry.name}: {answers}", flush=True)
            code = max(code, 3 if isinstance(answers, OracleBlocked) else 2)
            continue
        for lane, data in answers.items():
            path = folder / entry.golden(lane)
            same = path.is_file() and path.read_bytes() == data
            word = "same" if same else "new"
            print(f"models/{entry.golden(lane)}: {word}, {len(data)} bytes", flush=True)
            if check:
                code = max(code, 0 if same else 1)
            elif not same:
                golden.write(path, data, golden.MODEL_MAX_BYTES)
    if not check:
        golden.write_index(folder)
    if box.left:
        print(f"{box.left} models are missing: time ran out")
        return code if code == 1 else 2
    return code


def oracles() -> set[str]:
    """The oracles of ops, those of upstream's GPU build aside."""
    return {entry.oracle for entry in OPS.values()}


def _names(select: str, oracle: str | None) -> set[str]:
    """What `select` may name: goldens of `oracle`, or of all kinds."""
    from .model_table import MODELS
    from .schedule_traces import specs

    if oracle == gpu_models.ORACLE:
        return {name for entry in MODELS.values() for name in entry.names}
    if oracle is not None:
        return op_names()
    # A trace takes its time to be drawn: only where one is asked for.
    traces = {f"schedule.{s['name']}" for s in specs()} if "schedule." in select else set()
    return golden_names() | traces


def run(config: RunConfig) -> int:
    """The verb: every kind that `select` names; the gravest exit code."""
    parity = config.parity
    if parity.oracle is not None:
        check_oracle(parity.oracle, {*oracles(), GPU_ORACLE, gpu_models.ORACLE})
    if parity.select is not None:
        check_words(parity.select, _names(parity.select, parity.oracle))
    if parity.oracle == gpu_models.ORACLE:
        return gpu_models.record(parity.select, parity.check)
    # An oracle of ops says nothing of the other kinds; models take an hour, so they are named.
    kinds = ("ops",) if parity.oracle else ("ops", "schedule", "text")
    deadline = time.monotonic() + 60 * parity.minutes if parity.check else math.inf
    codes = []
    for kind, select in by_kind(parity.select, kinds).items():
        if time.monotonic() >= deadline:
            print(f"{kind} are missing: time ran out after {parity.minutes:g} minutes")
            codes.append(2)
        elif kind == "ops":
            gpu = parity.oracle == GPU_ORACLE
            where = {"ops": GPU_OPS, "folder": golden.OPS_GPU} if gpu else {}
            codes.append(record(select, parity.oracle, check=parity.check, **where))
        elif kind == "models":
            today = dt.datetime.now(dt.UTC).toordinal()
            codes.append(record_models(select, parity.check, deadline=deadline, day=today))
        elif kind == "text":
            codes.append(record_text(select, parity.check))
        else:
            codes.append(record_schedule(select, parity.check))
    return next((code for code in WORST_FIRST if code in codes), 0)
