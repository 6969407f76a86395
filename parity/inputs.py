# SPDX-License-Identifier: Apache-2.0
"""Inputs drawn from counter bits, the same on every machine and with every numpy.

Only the raw words of a Philox counter are used, which numpy keeps stable, and then integer
arithmetic and one division: no random distribution of a library, no libm. The counter's key is
the name of the case, so a case can't disturb another, and every dtype of a case starts from the
same numbers.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .dtypes import Array, array

FLOATS = ("f32", "bf16", "f16")
Arguments = dict[str, Any]
"""An op's arguments by name: Arrays and plain Python values."""


class Maker:
    """Draws the inputs of one case; each draw has a name of its own."""

    def __init__(self, op: str, case: str, dtype: str) -> None:
        self.path = f"{op}/{case}"
        self.dtype = dtype

    def words(self, name: str, count: int) -> np.ndarray:
        """uint64 [count]."""
        return _words(self.path, name, count)

    def normal(self, name: str, *shape: int, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
        """Close to normal, float64, within 6 `std`: the sum of twelve uniforms."""
        return _unit_normal(self.path, name, int(np.prod(shape))).reshape(shape) * std + mean

    def uniform(self, name: str, *shape: int) -> np.ndarray:
        """float64 in (0, 1), of 53 bits."""
        count = int(np.prod(shape))
        return (((self.words(name, count) >> np.uint64(12)) + 0.5) / 2.0**52).reshape(shape)

    def integers(self, name: str, low: int, high: int, *shape: int) -> np.ndarray:
        """int64 in [low, high)."""
        words = self.words(name, int(np.prod(shape)))
        return (low + (words % np.uint64(high - low)).astype(np.int64)).reshape(shape)

    def order(self, name: str, count: int) -> np.ndarray:
        """A permutation of range(count)."""
        return np.argsort(self.words(name, count), kind="stable")

    def float(self, values: np.ndarray, dtype: str | None = None) -> Array:
        """`values` in the case's dtype, or in `dtype`."""
        return array(values, dtype or self.dtype)

    def ints(self, values: Any, dtype: str = "i64") -> Array:
        """`values` as integers of `dtype`."""
        return array(np.asarray(values, np.int64), dtype)


def _words(path: str, name: str, count: int) -> np.ndarray:
    digest = hashlib.sha256(f"{path}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8")
    return np.random.Philox(key=key).random_raw(count)


@functools.lru_cache(maxsize=4)
def _unit_normal(path: str, name: str, count: int) -> np.ndarray:
    """float64 [count], read only. Kept for as long as the dtypes of a case take their turns."""
    sixteen = _words(path, name, 3 * count).astype("<u8").view("<u2").reshape(count, 12)
    centred = (sixteen.sum(axis=1, dtype=np.int64) - 6 * 65535) / 65536.0
    centred.flags.writeable = False
    return centred


@dataclass(frozen=True)
class Case:
    """Inputs of one op that can show a certain kind of fault.

    cells: the structural facts that it covers, for the report; strided: arguments that a provider
    gets as a slice of something wider, filled with NaN.
    """

    op: str
    name: str
    build: Callable[[Maker], Arguments]
    dtypes: tuple[str, ...] = FLOATS
    cells: tuple[str, ...] = ()
    strided: tuple[str, ...] = ()

    def arguments(self, dtype: str) -> Arguments:
        """The arguments in `dtype`."""
        return self.build(Maker(self.op, self.name, dtype))


class CaseTable:
    """Cases by op and name, in the order of their definition."""

    def __init__(self) -> None:
        self.cases: dict[tuple[str, str], Case] = {}

    def add(
        self, op: str, name: str, **facts: Any
    ) -> Callable[[Callable[[Maker], Arguments]], Callable[[Maker], Arguments]]:
        """Decorator of a function that builds the arguments. ValueError on a name twice."""

        def register(build: Callable[[Maker], Arguments]) -> Callable[[Maker], Arguments]:
            if (op, name) in self.cases:
                raise ValueError(f"op {op} has a case {name} already")
            self.cases[op, name] = Case(op, name, build, **facts)
            return build

        return register

    def of(self, op: str) -> list[Case]:
        """The cases of `op`."""
        return [case for case in self.cases.values() if case.op == op]

    def ops(self) -> list[str]:
        """Ops that have cases."""
        return list(dict.fromkeys(op for op, _ in self.cases))
