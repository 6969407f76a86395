# SPDX-License-Identifier: Apache-2.0
"""How large a floor may be: what other lanes of an oracle are off by has a bound of its own.

A floor is a file that can be edited, and every limit is a multiple of it. So it is held against
what doesn't come from that file: the golden's own error, and one unit in the last place of the
narrower of the output's dtype and that of the case, of which an oracle's inner steps may be.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np

from .compare import Floor
from .dtypes import Array, ulp

CAPS = {"rmse": 8.0, "row": 24.0, "worst": 10.0, "gain": 12.0}
"""Multiples of the larger of the two. Of the 454 goldens with other lanes, on a CPU and a GPU, the
99th percentiles are 2.4, 2.2, 3.5 and 5.6, and the largest are 7.2 and 9.4 (rmse and worst of
chunk_gated_delta_rule/fading.f32, a sum over the whole sequence), 23.8 (row of
fused_post_conv_prep/gates.f16, whose gates round to nothing in float16; the next is 2.7) and 11.2
(gain of fused_add_rms_norm/halfway.bf16, half-way cases that all round one way)."""


def fault(floor: Floor, golden: Array, truth: np.ndarray, dtype: str) -> str:
    """Which figure of a floor is above its cap; empty if none is.

    truth: float64, the shape of `golden`; dtype: of the case's inputs.
    """
    if golden.shape != truth.shape or not golden.data.size:
        return ""
    width = truth.shape[-1] if truth.ndim else 1
    fits = np.isfinite(truth) & np.isfinite(golden.values())
    t = np.where(fits, truth, 0.0).reshape(-1, width)
    g = np.where(fits, golden.values(), 0.0).reshape(-1, width)
    unit = ulp(t, golden.dtype)
    if dtype in ("f32", "f16", "bf16"):
        unit = np.maximum(unit, ulp(t, dtype))
    units, own = _figures(unit, t), _figures(np.abs(g - t), t)
    for name, value in asdict(floor).items():
        least = max(units[name], own[name])
        if value > CAPS[name] * least:
            return (
                f"{name} {value:.3g} is {value / max(least, 1e-300):.3g} times the golden's own "
                f"error or a unit in its last place, at most {CAPS[name]:g} are believed"
            )
    return ""


def _figures(error: np.ndarray, t: np.ndarray) -> dict[str, float]:
    """An error as the figures of a Floor; error, t: [rows, width]."""
    scale = np.sqrt((t * t).mean(axis=1))
    safe = np.where(scale > 0, scale, 1.0)
    rows = np.sqrt((error * error).mean(axis=1)) / safe
    return {
        "rmse": _rms(error) / (_rms(t) or 1.0),
        "row": max(_rms(rows), float(rows.max(initial=0.0))),
        "worst": float(error.max(initial=0.0)) / max(float(scale.max(initial=0.0)), 1e-300),
        "gain": float(np.sqrt((error * error * t * t).sum())) / (float((t * t).sum()) or 1.0),
    }


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt((values * values).mean()))
