# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity probe [select=...] [provider=...]`: laws that ops keep, shown without a golden.

Each probe calls an op twice, with arguments of a case and with changed ones, and knows what the
second answer must be of the first: mostly the same bits.

rows      rows in another order give rows in that order: no row sees its neighbours
double    twice the value, weight or input gives twice the answer, exactly
blocks    the cache's blocks in other places, the block table to match, give the same bits
poison    what no request may read holds NaN: with zeros there the bits are the same
constant  attention over values that are all one is one

Each has a control: an answer that breaks the law by a little. If that passes, the probe shows
nothing and its row is invalid. The cells that `minutes=` leaves undone are missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vllmx.config import RunConfig

from . import evidence
from .cells import LAWS, PROBE
from .dtypes import MANTISSA, SMALLEST_EXPONENT, Array, array
from .evidence import Row
from .inputs import Arguments
from .op_cells import OpCell, expected, implementation
from .op_replay import closure_of
from .replay import TimeBox, device_of, exit_code, no_cell
from .selection import check_words, op_names
from .torch_calls import Call, Outputs

ROWS = {
    "rms_norm": ("x",),
    "fused_add_rms_norm": ("x", "x_residual"),
    "silu_and_mul": ("x",),
    "gelu_and_mul": ("x",),
    "embedding": ("input_ids",),
    "rotary_embedding": ("positions", "query", "key"),
}
"""Op -> arguments whose first dimension is tokens that don't see each other."""
DOUBLED = {"linear": "x", "embedding": "weight", "paged_attention": "value_cache"}
ROUNDING = {"f32": 2.0**-20, "f16": 2.0**-9, "bf16": 2.0**-6}
"""How far from one the sum of attention weights may be."""


@dataclass(frozen=True)
class Probe:
    """A law of some ops.

    change: arguments -> the changed ones, None where the case has none; holds: (answer, answer to
    the changed arguments) -> whether the law holds; broken: an answer that breaks it.
    """

    name: str
    change: Callable[[str, Arguments], Arguments | None]
    holds: Callable[[Outputs, Outputs], bool]
    broken: Callable[[Outputs], Outputs]


def _rows(op: str, arguments: Arguments) -> Arguments | None:
    names = [name for name in ROWS.get(op, ()) if arguments.get(name) is not None]
    if not names or arguments[names[0]].shape[0] < 2:
        return None
    return {**arguments, **{n: _like(arguments[n], arguments[n].data[::-1]) for n in names}}


def _double(op: str, arguments: Arguments) -> Arguments | None:
    name = DOUBLED.get(op)
    if name is None or arguments.get("bias") is not None:
        return None
    doubled = array(arguments[name].values() * 2, arguments[name].dtype)
    lost = np.isinf(doubled.values()) & ~np.isinf(arguments[name].values())
    return None if lost.any() else {**arguments, name: doubled}


def _blocks(op: str, arguments: Arguments) -> Arguments | None:
    if op != "paged_attention" or arguments["key_cache"].shape[0] < 3:
        return None
    count = arguments["key_cache"].shape[0]
    moved = np.concatenate([[0], np.roll(np.arange(1, count), 1)])  # block i goes to moved[i]
    place = np.argsort(moved)
    caches = {
        name: _like(arguments[name], arguments[name].data[place])
        for name in ("key_cache", "value_cache")
    }
    table = arguments["block_table"]
    return {**arguments, **caches, "block_table": array(moved[table.data], table.dtype)}


def _poison(op: str, arguments: Arguments) -> Arguments | None:
    if op != "paged_attention":
        return None
    caches = {name: arguments[name] for name in ("key_cache", "value_cache")}
    if not any(np.isnan(cache.values()).any() for cache in caches.values()):
        return None
    clean = {n: array(np.nan_to_num(c.values(), nan=0.0), c.dtype) for n, c in caches.items()}
    return {**arguments, **clean}


def _constant(op: str, arguments: Arguments) -> Arguments | None:
    # A sink takes its share and has no value.
    if op != "paged_attention" or arguments.get("sinks") is not None:
        return None
    cache = arguments["value_cache"]
    return {**arguments, "value_cache": array(np.ones(cache.shape), cache.dtype)}


def _same(first: Outputs, second: Outputs) -> bool:
    return all(first[name].tobytes() == second[name].tobytes() for name in first)


def _reversed(first: Outputs, second: Outputs) -> bool:
    return all(
        np.ascontiguousarray(first[name].data[::-1]).tobytes() == second[name].tobytes()
        for name in first
    )


def _twice(first: Outputs, second: Outputs) -> bool:
    return all(_is_twice(first[name], second[name]) for name in first)


def _is_twice(one: Array, two: Array) -> bool:
    """Exactly, but for what is subnormal in the one and so was rounded more coarsely."""
    low = 2.0 ** SMALLEST_EXPONENT[one.dtype]
    step = low * 2.0 ** -MANTISSA[one.dtype]
    allowed = np.where(np.abs(one.values()) < low, step, 0.0)
    off = np.abs(one.values() * 2 - two.values())
    return bool((off <= allowed).all())


def _ones(first: Outputs, second: Outputs) -> bool:
    return all(
        np.abs(value.values() - 1).max() <= ROUNDING[value.dtype] for value in second.values()
    )


def _bent(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Outputs], Outputs]:
    def apply(outputs: Outputs) -> Outputs:
        return {name: array(change(value.values()), value.dtype) for name, value in outputs.items()}

    return apply


def _neighbour(values: np.ndarray) -> np.ndarray:
    """The first row takes a part of the last one."""
    bent = values.copy()
    bent[0] = bent[0] + 0.25 * bent[-1] + 0.5
    return bent


PROBES = (
    Probe("rows", _rows, _reversed, _bent(_neighbour)),
    Probe("double", _double, _twice, _bent(lambda values: values + 0.5)),
    Probe("blocks", _blocks, _same, _bent(_neighbour)),
    Probe("poison", _poison, _same, _bent(_neighbour)),
    Probe("constant", _constant, _ones, _bent(lambda values: values * 1.05)),
)
assert tuple(probe.name for probe in PROBES) == LAWS


def rows_of(cell: OpCell, device: str, facts: dict[str, Any]) -> Iterator[Row]:
    """A row for every probe that says something about a cell."""
    case = cell.entry.table.cases[cell.op, cell.case]
    arguments = case.arguments(cell.dtype)
    first: Outputs | None = None
    for probe in PROBES:
        changed = probe.change(cell.op, arguments)
        if changed is None:
            continue
        started = time.monotonic()
        try:
            impl = implementation(cell)
            if first is None:
                first = Call(cell.entry, case, arguments, impl, device)()
            second = Call(cell.entry, case, changed, impl, device)()
            verdict, reason = judge(probe, first, second)
        except Exception as error:
            verdict, reason = "error", f"{type(error).__name__}: {error}"
        fields: dict[str, Any] = {"reason": reason} if reason else {}
        yield evidence.make_row(
            feature=cell.feature,
            case=f"{probe.name}:{cell.case_name}",
            provider=cell.provider,
            device={"name": device},
            mode=PROBE,
            golden_sha="",
            closure=closure_of(cell),
            oracle={},
            verdict=verdict,
            checks={},
            proof={"selected": cell.provider},
            run=facts,
            seconds=time.monotonic() - started,
            **fields,
        )


def judge(probe: Probe, first: Outputs, second: Outputs) -> tuple[str, str]:
    """(verdict, reason): the law, and before it the control that must break it."""
    if probe.holds(first, probe.broken(second)):
        return "invalid", f"{probe.name} can't fail here: a broken answer passes"
    if not probe.holds(first, second):
        return "fail", f"{probe.name} does not hold"
    return "pass", ""


def run(config: RunConfig) -> int:
    """0: all laws hold; 1: one is broken; 2: a control passed, nothing was selected or time
    ran out; 3: the device is not here."""
    options = config.parity
    box = TimeBox(time.monotonic() + 60 * options.minutes)
    device = device_of(config)
    if device is None:
        return 3
    if options.select is not None:
        check_words(options.select, op_names())
    facts = evidence.run_facts()
    rows: list[Row] = []
    cells = expected(device, options.select, options.provider)
    for (cell,) in box.take([c] for c in cells if not c.refused and not c.blocked):
        rows += rows_of(cell, device, facts)
    if box.left:
        print(f"{box.left} cells are missing: time ran out after {options.minutes:g} minutes")
    if not rows and box.left:
        return 2
    if not rows:
        provider = options.provider
        if provider and provider not in {c.provider for c in expected(device, options.select)}:
            raise no_cell(device, options.select, provider)
        print(f"no law is about select={options.select} provider={options.provider} on {device}")
        return 2
    for row in rows:
        if row["verdict"] != "pass":
            cell_name = f"{row['feature']} {row['case']} {row['provider']}"
            print(f"{row['verdict']}: {cell_name}: {row['reason']}")
    shown = sum(row["verdict"] == "pass" for row in rows)
    print(f"{shown} of {len(rows)} probes hold")
    folder = Path(options.output_dir) if options.output_dir else evidence.EVIDENCE
    print(f"evidence: {evidence.append(rows, folder)}")
    code = exit_code(rows)
    return 2 if box.left and code != 1 else code


def _like(old: Array, data: np.ndarray) -> Array:
    return Array(old.dtype, np.ascontiguousarray(data))
