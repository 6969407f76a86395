# SPDX-License-Identifier: Apache-2.0
"""Which providers of an op ran while a cell was called, seen from the functions that were entered.

A kernel that hands what it can't do to another provider, or to the definition, gives right answers
of another provider's. What a cell asked for is no proof of what ran.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from vllmx.ir.op import IrOpImpl


@contextmanager
def watched(impl: IrOpImpl | None) -> Iterator[Counter[str]]:
    """Count what runs inside by provider: those of the op of `impl` alone; nothing without one."""
    found: Counter[str] = Counter()
    known = {} if impl is None else _codes(impl)

    def entered(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code in known:
            found[known[frame.f_code]] += 1

    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        yield found
    finally:
        sys.setprofile(before)


def proof(asked: str, impl: IrOpImpl | None, found: Counter[str]) -> dict[str, Any]:
    """What evidence says of a call: the provider that ran, and those that it fell back to."""
    if impl is None:  # an op that has no choice of providers
        return {"selected": asked}
    others = {name: count for name, count in sorted(found.items()) if name != asked}
    told: dict[str, Any] = {"selected": asked if found[asked] else next(iter(others), "")}
    if others:
        told["fallbacks"] = others
    return told


def _codes(impl: IrOpImpl) -> dict[CodeType, str]:
    """Code of each function that serves the op, and its provider: that of `impl` where two have the
    same function."""
    codes = {}
    for each in (*impl.op.impls.values(), impl):  # the last one said counts
        code = getattr(inspect.unwrap(each.fn), "__code__", None)
        if code is not None:
            codes[code] = each.provider
    return codes
