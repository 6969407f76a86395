# SPDX-License-Identifier: Apache-2.0
"""The canary: a fault planted for ever, which must be found every time.

It goes the way of every other case: an op of vllmx, the comparison, a row of evidence, the ledger.
What it computes has the wrong sign. If its row is ever anything but red, something on that way lets
faults through, and ledger and report say that they can't be believed.
"""

from __future__ import annotations


def look() -> tuple[str, str]:
    """(verdict, reason) of the planted case; pass if either comparison accepts it."""
    import torch

    from vllmx.ir.ops.activation import silu_and_mul

    from . import policy
    from .compare import Floor, compare_exact, compare_float
    from .dtypes import array

    right = silu_and_mul(torch.linspace(-4, 4, 64).reshape(4, 16)).double().numpy()
    want, wrong = array(right, "f32"), array(-right, "f32")
    limits = policy.load()
    drift = limits.drift_of("pointwise")
    judged = compare_float(wrong, want, right, limits.red["pointwise"], Floor(), drift)
    if judged.ok or compare_exact(wrong, want).ok:
        return "pass", ""
    broken = ", ".join(judged.failed)
    return "fail", f"planted: the wrong sign; it breaks {broken}"
