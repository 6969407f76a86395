# SPDX-License-Identifier: Apache-2.0
"""Whether an output is as good as the oracle's: five rules against float64 truth.

x is ours, g the golden, t the truth. No rule has a tolerance of its own: each allows a multiple
of what the golden itself is off by, and never less than what rounding the truth to the dtype costs.

finite  NaN and infinities stand exactly where the truth has them
rmse    root mean square of x - t
row     the same of every row of the last dimension: a stale, swapped or dropped row
ulp     every element: in units of the last place, or of the golden's worst error in its row or,
        by scale, in all rows
gain    least-squares factor of x - t on t, beside the golden's or beside none: a bias far below
        one unit in the last place; needs 2048 elements

An exact output has one rule, `bits`. An output without elements passes nothing. `teeth` turns the
golden into outputs that are plainly wrong; a case on which one of them passes can show nothing.
`floor` holds what other lanes of the oracle are off by, where there are some.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .dtypes import Array, array, rounded, ulp
from .evidence import headroom
from .policy import Limits

FEW_ELEMENTS = 16
"""An output of fewer has no root mean square worth the name: that of one element of the golden is
its luck. There the units of `rmse` and `row` are at least one in the last place (the sum of 131
squares in float32, one number: the golden is 0.6 off, torch's sum on another CPU 1.6)."""
GAIN_ELEMENTS = 2048
GAIN_FLOOR = 2.0**-22
"""A bias that float32 arithmetic may have by itself, of two units in its last place."""


@dataclass(frozen=True)
class Check:
    """One measured figure and what is allowed."""

    measured: float
    limit: float

    @property
    def ok(self) -> bool:
        """Whether the limit holds; a NaN never does."""
        return bool(self.measured <= self.limit)

    def as_dict(self) -> dict[str, float]:
        """As evidence has it; what isn't finite becomes 1e300."""
        measured = float(self.measured) if np.isfinite(self.measured) else 1e300
        return {
            "measured": measured,
            "limit": float(self.limit),
            "headroom": float(headroom(measured, self.limit)),
        }


@dataclass(frozen=True)
class Floor:
    """What the oracle's lanes are off by: errors relative to the truth's own scale."""

    rmse: float = 0.0
    row: float = 0.0
    worst: float = 0.0
    gain: float = 0.0


@dataclass
class Result:
    """The checks of one output, and which of them crossed the drift line."""

    checks: dict[str, Check] = field(default_factory=dict)
    drift: list[str] = field(default_factory=list)
    worst: tuple[int, ...] = ()
    """Indices of the element that is farthest off; none where nothing differs."""

    @property
    def ok(self) -> bool:
        """Whether every check holds; no checks at all don't count as success."""
        return bool(self.checks) and all(check.ok for check in self.checks.values())

    @property
    def failed(self) -> list[str]:
        """Names of the checks that do not hold."""
        return [name for name, check in self.checks.items() if not check.ok]


def layout_fault(x: Array, g: Array) -> str | None:
    """How shape or dtype differ, None if they don't."""
    if x.dtype != g.dtype:
        return f"dtype {x.dtype}, not {g.dtype}"
    if x.shape != g.shape:
        return f"shape {list(x.shape)}, not {list(g.shape)}"
    return None


def compare_exact(x: Array, g: Array) -> Result:
    """Elements that differ in any bit: none may. NaN equals NaN, whatever its payload."""
    if layout_fault(x, g) or not g.data.size:
        return Result({"bits": Check(float(max(x.data.size, 1)), 0.0)})
    a, b = x.data, g.data
    same = a.view(np.uint8).reshape(*a.shape, -1) == b.view(np.uint8).reshape(*b.shape, -1)
    equal = same.all(axis=-1)
    if g.is_float:
        equal |= np.isnan(x.values()) & np.isnan(g.values())
    return Result({"bits": Check(float((~equal).sum()), 0.0)}, worst=_place(~equal))


def compare_float(
    x: Array,
    g: Array,
    t: np.ndarray,
    limits: Limits,
    floor: Floor | None = None,
    drift: Limits | None = None,
) -> Result:
    """The five rules on one floating output; t: float64, the shape of g."""
    if layout_fault(x, g) or t.shape != g.shape or not g.data.size:
        return Result({"finite": Check(float(max(x.data.size, 1)), 0.0)})
    mine, gold, true, unlike = _aligned(x.values(), g.values(), t)
    result = Result({"finite": Check(float(unlike), 0.0)})
    errors = Errors.of(true, gold, g.dtype, floor or Floor())
    result.checks |= errors.checks(mine, limits)
    far = np.abs(mine - true) / np.maximum(errors.worst, 1e-300)
    # What is not finite in one of them only is farther than any number.
    odd = np.isfinite(x.values()) != np.isfinite(t)
    result.worst = _place(np.where(odd, np.inf, far.reshape(t.shape)))
    if drift is not None:
        crossed = errors.checks(mine, drift)
        result.drift = [name for name, check in crossed.items() if not check.ok]
    return result


def _place(amount: np.ndarray) -> tuple[int, ...]:
    """Indices of the largest amount, the first of several; none where all are zero."""
    if not amount.any():
        return ()
    return tuple(int(i) for i in np.unravel_index(int(amount.argmax()), amount.shape))


def golden_fault(g: Array, t: np.ndarray, cap: float = 4.0, dtype: str | None = None) -> str | None:
    """Why truth and golden can't both be right, None if they can.

    The golden's error may be `cap` times that of a few roundings to `dtype`, by default its own.
    """
    if g.shape != t.shape:
        return f"the truth has shape {list(t.shape)}, the golden {list(g.shape)}"
    _, gold, true, unlike = _aligned(g.values(), g.values(), t)
    if unlike:
        return f"{unlike} elements are not finite in one of them only"
    error, step = _rms(gold - true), _rms(ulp(true, dtype or g.dtype))
    if error > cap * step:
        return f"the golden is off by {error:.2e}, a unit in the last place is {step:.2e}"
    return None


def _aligned(
    x: np.ndarray, g: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """x, g, t as rows with what is not finite in t set to zero, and how many places of x are unlike
    t there."""
    special = ~np.isfinite(t)
    same = (x == t) | (np.isnan(x) & np.isnan(t))
    unlike = int((special & ~same).sum() + (~special & ~np.isfinite(x)).sum())
    width = t.shape[-1] if t.ndim else 1
    rows = []
    for values in (x, g, t):
        kept = np.where(special | ~np.isfinite(values), 0.0, values)
        rows.append(kept.reshape(-1, width))
    return rows[0], rows[1], rows[2], unlike


@dataclass(frozen=True)
class Errors:
    """What is allowed on one output before it is multiplied: the golden's errors against truth,
    never below those of rounding the truth once, never below the floor's."""

    t: np.ndarray
    g: np.ndarray
    dtype: str
    rmse: float
    row: np.ndarray
    worst: np.ndarray
    gain: float
    gain_error: float

    @classmethod
    def of(cls, t: np.ndarray, g: np.ndarray, dtype: str, floor: Floor) -> Errors:
        """Measure the golden; t, g: [rows, width]."""
        once = np.abs(rounded(t, dtype) - t)
        off = np.maximum(np.abs(g - t), once)
        scale = np.sqrt((t * t).mean(axis=1))
        safe = np.where(scale > 0, scale, 1.0)
        least = ulp(t, dtype) if t.size < FEW_ELEMENTS else once
        by_row = np.maximum(_row_rms(g - t), _row_rms(least))
        typical = max(float(np.median(by_row / safe)), floor.row)
        by_element = np.abs(g - t).max(axis=1, initial=0.0)
        worst = float(by_element.max(initial=0.0)) / max(float(scale.max(initial=0.0)), 1e-300)
        in_row = np.maximum(by_element, max(worst, floor.worst) * scale)
        energy = float((t * t).sum()) or 1.0
        return cls(
            t,
            g,
            dtype,
            rmse=max(_rms(g - t), _rms(least), floor.rmse * _rms(t)),
            row=np.maximum(by_row, typical * scale),
            worst=np.maximum(ulp(t, dtype), in_row[:, None]),
            gain=float(((g - t) * t).sum()) / energy,
            gain_error=max(float(np.sqrt((off * off * t * t).sum())) / energy, floor.gain),
        )

    def checks(self, x: np.ndarray, limits: Limits) -> dict[str, Check]:
        """The four measured rules on x."""
        error = x - self.t
        over_row = _row_rms(error) / np.maximum(self.row, 1e-300)
        over_ulp = np.abs(error) / np.maximum(self.worst, 1e-300)
        found = {
            "rmse": Check(_rms(error), limits.rmse * self.rmse),
            "row": Check(float(over_row.max(initial=0.0)), limits.row),
            "ulp": Check(float(over_ulp.max(initial=0.0)), limits.ulp),
        }
        if self.t.size >= GAIN_ELEMENTS:
            energy = float((self.t * self.t).sum()) or 1.0
            bias = float((error * self.t).sum()) / energy
            # Where the golden is biased, being true is as good as being like it.
            bias = min(abs(bias - self.gain), abs(bias))
            allowed = limits.gain * np.sqrt(2.0) * self.gain_error
            found["gain"] = Check(bias, max(float(allowed), GAIN_FLOOR))
        return found


def floor_of(x: Array, t: np.ndarray) -> Floor:
    """What another lane's output x is off by, as a floor."""
    lane, _, true, _ = _aligned(x.values(), x.values(), t)
    error, scale = lane - true, np.sqrt((true * true).mean(axis=1))
    safe = np.where(scale > 0, scale, 1.0)
    energy = float((true * true).sum()) or 1.0
    return Floor(
        rmse=_rms(error) / (_rms(true) or 1.0),
        row=_rms(_row_rms(error) / safe),
        worst=float(np.abs(error).max(initial=0.0)) / max(float(scale.max(initial=0.0)), 1e-300),
        # A lane that is biased itself allows as much as the drift line does.
        gain=max(
            float(np.sqrt((error * error * true * true).sum())) / energy,
            abs(float((error * true).sum())) / energy / 4,
        ),
    )


def worst_of(floors: list[Floor]) -> Floor:
    """The largest of each figure."""
    if not floors:
        return Floor()
    return Floor(*(max(getattr(f, n) for f in floors) for n in ("rmse", "row", "worst", "gain")))


def wrong_copies(g: Array) -> dict[str, Array]:
    """Outputs that must fail: zero, rows moved on, columns swapped, their mean, negated, doubled.

    What would be equal to the golden is left out.
    """
    values = g.data
    width = values.shape[-1] if values.ndim else 1
    rows = values.reshape(-1, width)
    if g.is_float:
        floats = g.values()
        finite = floats[np.isfinite(floats)]
        mean = float(finite.mean()) if finite.size else 0.0
        arithmetic = {
            "mean": _like(g, np.where(np.isfinite(floats), mean, floats)),
            "negated": _like(g, -floats),
            "doubled": _like(g, floats * 2),
        }
    else:
        arithmetic = {"added": Array(g.dtype, values + np.ones((), values.dtype))}
    copies = {
        "zero": Array(g.dtype, np.zeros_like(values)),
        "rows moved": Array(g.dtype, np.roll(rows, 1, axis=0).reshape(values.shape)),
        "columns moved": Array(g.dtype, np.roll(rows, 1, axis=1).reshape(values.shape)),
        **arithmetic,
    }
    return {name: copy for name, copy in copies.items() if not compare_exact(copy, g).ok}


def teeth(g: Array, judge: Callable[[Array], Result]) -> dict[str, bool]:
    """For each wrong copy whether `judge` refuses it; an empty golden has no teeth at all."""
    return {name: not judge(copy).ok for name, copy in wrong_copies(g).items()}


def _like(g: Array, values: np.ndarray) -> Array:
    return array(values, g.dtype)


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values * values).mean())) if values.size else 0.0


def _row_rms(values: np.ndarray) -> np.ndarray:
    return np.sqrt((values * values).mean(axis=1))
