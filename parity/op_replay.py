# SPDX-License-Identifier: Apache-2.0
"""One cell of an op: read its golden, draw its inputs, run ours, compare, and say so in a row."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import closure, evidence, floor_cap, golden, policy, served
from .calibrate import FLOORS, Floors
from .compare import Check, Floor, Result, compare_exact, compare_float, teeth
from .dtypes import Array
from .evidence import Row, make_row
from .golden import Golden, GoldenError
from .inputs import Arguments
from .op_cells import MODE, OpCell, implementation
from .op_table import EXACT, OWN
from .torch_calls import Call, Outputs
from .truths import Outputs as Truths
from .truths import cap_of, contradiction, prepare, symbols_of, truth_of

NOTHING = {"fine": "", "coarse": ""}
C_SOURCES = ("vllmx/kernels/native.c",)
"""What the provider `native` is compiled from."""
COMPARISON = (
    "parity/compare.py:compare_float",
    "parity/compare.py:compare_exact",
    "parity/truths.py:contradiction",
)


class Lane:
    """Replays cells on one device against the goldens of one folder."""

    def __init__(self, device: str = "cpu", folder: Path = golden.OPS, mode: str = MODE) -> None:
        self.device = device
        self.mode = mode
        self.folder = folder
        self.policy = policy.load()
        self.run = evidence.run_facts()
        self.device_facts = device_facts(device)
        try:
            self.index, self.index_fault = golden.read_index(folder), ""
            self.floors: Floors | None = Floors(folder)
        except GoldenError as error:
            self.index, self.index_fault, self.floors = {}, str(error), None
        self._last: tuple[str, tuple[Golden, Arguments, Truths | None]] | None = None

    def prepare(self, cells: Iterable[OpCell]) -> None:
        """Ask the truth of all of `cells` at once, where `row` would ask for each."""
        asked = {cell.golden: cell for cell in cells if not (cell.refused or cell.blocked)}
        try:
            prepare(
                (cell.op, cell.entry.table.cases[cell.op, cell.case].arguments(cell.dtype))
                for cell in asked.values()
            )
        except GoldenError as error:
            print(f"{error}; every cell asks for itself")

    def row(self, cell: OpCell) -> Row:
        """The evidence of a cell, whatever comes of it."""
        started = time.monotonic()
        row: dict[str, Any] = {
            "feature": cell.feature,
            "case": cell.case_name,
            "provider": cell.provider,
            "golden_sha": self.index.get(cell.golden, ""),
            "closure": closure_of(cell),
            "oracle": {
                "name": cell.entry.oracle,
                "version": "",
                "lane": cell.entry.lane,
                "floor": self._floor_sha(cell),
            },
            "checks": {},
            "proof": {"selected": "", "calls": 0},
        }
        try:
            row |= self._judged(cell)
        except GoldenError as error:
            row |= {"verdict": "invalid", "reason": str(error)}
        except Exception as error:
            row |= {"verdict": "error", "reason": f"{type(error).__name__}: {error}"}
        return self._finish(row, time.monotonic() - started)

    def stray(self, name: str) -> Row:
        """The row of a file that is no golden of any case."""
        reason = f"{name} is a file that no case expects"
        return self._nothing("op.stray", name, reason)

    def uncovered(self, op: str) -> Row:
        """The row of an op that has no cases."""
        return self._nothing(f"op.{op}", "none", f"op {op} has no case in parity/op_table.py")

    def _nothing(self, feature: str, case: str, reason: str) -> Row:
        row: dict[str, Any] = {"feature": feature, "case": case, "provider": OWN}
        row |= {"golden_sha": ""}
        row |= {"closure": NOTHING, "oracle": {}, "checks": {}, "proof": {}}
        return self._finish({**row, "verdict": "invalid", "reason": reason}, 0.0)

    def _finish(self, row: dict[str, Any], seconds: float) -> Row:
        return make_row(
            **row,
            device=self.device_facts,
            mode=self.mode,
            policy_sha=self.policy.sha256,
            run=self.run,
            seconds=round(seconds, 4),
        )

    def _judged(self, cell: OpCell) -> dict[str, Any]:
        if cell.blocked:
            return {"verdict": "skip", "reason": cell.blocked}
        found, arguments, truth = self._expected(cell)
        case = cell.entry.table.cases[cell.op, cell.case]
        impl = implementation(cell)
        call = Call(cell.entry, case, arguments, impl, self.device)
        with served.watched(impl) as ran:
            first = call()
        kept = {name: value.tobytes() for name, value in first.items()}
        again = call()
        judge = _Judge(self, cell, found, truth)
        if fault := judge.contradiction():
            return {"verdict": "error", "reason": f"golden and float64 truth disagree: {fault}"}
        if fault := judge.floor_fault():
            return {"verdict": "error", "reason": f"{FLOORS} is not to be believed: {fault}"}
        checks, drift, worst = judge.outputs(first)
        unlike = sum(kept.get(name) != value.tobytes() for name, value in again.items())
        checks["repeat"] = Check(float(unlike), 0.0)
        failed = [name for name, check in checks.items() if not check.ok]
        row: dict[str, Any] = {
            "oracle": {**_oracle_facts(found), "floor": self._floor_sha(cell)},
            "checks": {name: check.as_dict() for name, check in checks.items()},
            "teeth": judge.teeth(),
            "proof": {
                **served.proof(cell.provider, impl, ran),
                "calls": call.calls,
                "code": _symbol(cell),
            },
            "verdict": "fail" if failed else "pass",
        }
        if failed:
            row["reason"] = "; ".join(_words(name, checks[name]) for name in failed)
        if worst:
            row["details"] = {"worst": worst}
        if drift:
            row["details"] = {**row.get("details", {}), "drift": ", ".join(drift)}
        toothless = sorted(name for name, caught in row["teeth"].items() if not caught)
        if toothless or not row["teeth"]:
            missed = ", ".join(toothless) or "anything"
            row |= {"verdict": "error", "reason": f"the case is degenerate: it lets {missed} pass"}
        return row

    def _floor_sha(self, cell: OpCell) -> str:
        return self.floors.sha(cell.golden) if self.floors is not None else ""

    def _expected(self, cell: OpCell) -> tuple[Golden, Arguments, Truths | None]:
        """The golden, the arguments drawn anew, and the truth; GoldenError where they don't fit."""
        if self._last is not None and self._last[0] == cell.golden:
            return self._last[1]
        if self.index_fault:
            raise GoldenError(self.index_fault)
        found = golden.read(self.folder / cell.golden)
        if self.index.get(cell.golden) != found.sha256:
            raise GoldenError(f"{cell.golden} is not the file that the index knows")
        facts = found.facts
        told = (facts["feature"], facts["case"], facts["dtype"], facts["class"])
        if told != (cell.feature, cell.case, cell.dtype, cell.entry.kind):
            raise GoldenError(f"{cell.golden} is of {' '.join(told)}")
        arguments = cell.entry.table.cases[cell.op, cell.case].arguments(cell.dtype)
        drawn = {k: v.sha256 for k, v in arguments.items() if isinstance(v, Array)}
        plain = {k: v for k, v in arguments.items() if not isinstance(v, Array)}
        if drawn != found.input_shas() or plain != facts["args"]:
            raise GoldenError(f"{cell.golden} was recorded for other inputs; record it again")
        result = found, arguments, truth_of(cell.op, arguments)
        self._last = (cell.golden, result)
        return result


class _Judge:
    """Compares the outputs of one cell."""

    def __init__(self, lane: Lane, cell: OpCell, found: Golden, truth: Truths | None) -> None:
        self.cell = cell
        self.golden = found
        self.truth = truth
        self.policy = lane.policy
        assert lane.floors is not None
        self.floors: dict[str, Floor | None] = {
            name: lane.floors.of(cell.golden, found.sha256, name) for name in found.outputs()
        }

    def contradiction(self) -> str:
        """How the golden and the truth disagree; empty if they don't."""
        entry = self.cell.entry
        told = (
            contradiction(
                *(name, value, self.truth, entry.kind_of(name) == EXACT),
                *(cap_of(entry.name, entry.kind), self.cell.dtype),
            )
            for name, value in self.golden.outputs().items()
        )
        return next(filter(None, told), "")

    def floor_fault(self) -> str:
        """Which floor is larger than any noise of an oracle; empty if none is."""
        for name, floor in self.floors.items():
            if floor is None or self.truth is None or self.cell.entry.kind_of(name) == EXACT:
                continue
            want = self.golden.outputs()[name]
            if told := floor_cap.fault(floor, want, self.truth[name], self.cell.dtype):
                return f"{name}: {told}; `vllmx parity calibrate` measures it again"
        return ""

    def outputs(
        self, got: Outputs
    ) -> tuple[dict[str, Check], list[str], dict[str, dict[str, Any]]]:
        """All checks by name, those that drift, and by output where it is farthest off."""
        want, worst = self.golden.outputs(), {}
        checks = {"outputs": Check(float(len(got.keys() ^ want.keys())), 0.0)}
        drift: list[str] = []
        for name in want.keys() & got.keys():
            result = self.one(name, got[name])
            prefix = "" if len(want) == 1 else f"{name}."
            checks |= {f"{prefix}{k}": check for k, check in result.checks.items()}
            drift += [f"{prefix}{k}" for k in result.drift]
            if result.worst:
                worst[name] = self._element(name, got[name], result.worst)
        return dict(sorted(checks.items())), drift, worst

    def _element(self, name: str, got: Array, place: tuple[int, ...]) -> dict[str, Any]:
        """Where an output is farthest off, and what stands there: in words, as evidence has no
        infinities."""
        found: dict[str, Any] = {"at": list(place), "ours": f"{got.values()[place]:.9g}"}
        found["golden"] = f"{self.golden.outputs()[name].values()[place]:.9g}"
        if self.truth is not None and self.cell.entry.kind_of(name) != EXACT:
            found["truth"] = f"{self.truth[name][place]:.9g}"
        return found

    def one(self, name: str, value: Array) -> Result:
        """The result of one output."""
        cell, want = self.cell, self.golden.outputs()[name]
        if cell.entry.kind_of(name) == EXACT:
            return compare_exact(value, want)
        assert self.truth is not None  # else truth and golden would contradict each other
        limits = self.policy.limits(
            cell.entry.kind, cell.op, cell.provider, cell.dtype, cell.device
        )
        drift = self.policy.drift_of(cell.entry.kind)
        args = (want, self.truth[name], limits, self.floors[name], drift)
        return compare_float(value, *args)

    def teeth(self) -> dict[str, bool]:
        """Whether each wrong copy of each output would be refused."""
        found: dict[str, bool] = {}
        for name, value in self.golden.outputs().items():
            for copy, caught in teeth(value, partial(self.one, name)).items():
                found[copy] = found.get(copy, True) and caught
        return found


@functools.cache
def _symbols(op: str, provider: str) -> tuple[str, ...]:
    cell = OpCell(op, "", "", provider, "")
    impl = implementation(cell)
    own = [f"parity/sampler_calls.py:{op}"] if impl is None else [closure.symbol_of(impl.fn)]
    if impl is not None:
        own.append(closure.symbol_of(impl.op.fn))
    return (*own, *symbols_of(op), *COMPARISON)


@functools.cache
def sources() -> closure.Sources:
    """The files of this checkout, which closures of all cells share."""
    return closure.Sources(closure.ROOT)


@functools.cache
def _closure(op: str, provider: str) -> dict[str, str]:
    extra = closure.beside(C_SOURCES if provider == "native" else ())
    return closure.closure(_symbols(op, provider), extra, sources=sources())


def closure_of(cell: OpCell) -> dict[str, str]:
    """The closure of what a cell runs: provider, definition, truth and comparison."""
    return dict(_closure(cell.op, cell.provider))


def _symbol(cell: OpCell) -> str:
    return _symbols(cell.op, cell.provider)[0]


def _oracle_facts(found: Golden) -> dict[str, str]:
    oracle = found.facts["oracle"]
    return {key: str(oracle[key]) for key in ("name", "version", "lane")}


def _words(name: str, check: Check) -> str:
    return f"{name} {check.measured:.3g}, {check.limit:.3g} allowed"


def device_facts(device: str) -> dict[str, str]:
    """What evidence says of a device."""
    if device != "cuda":
        return {"name": device, "isa": torch.backends.cpu.get_cpu_capability()}
    major, minor = torch.cuda.get_device_capability()
    return {
        "name": device,
        "model": torch.cuda.get_device_name(),
        "sm": f"{major}{minor}",
        "cuda": str(torch.version.cuda),
    }
