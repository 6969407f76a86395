# SPDX-License-Identifier: Apache-2.0
"""The canary: a fault planted for ever, which must be found every time.

It goes the way of every other case: an op of vllmx, the comparison, a row of evidence, the ledger.
Its expectation has the wrong sign. If its row is ever anything but red, something on that way lets
faults through, and ledger and report say that they can't be believed.
"""

from __future__ import annotations


def look() -> tuple[str, str]:
    """(verdict, reason) of the planted case."""
    import torch

    from vllmx.ir.ops.activation import silu_and_mul

    x = torch.linspace(-4, 4, 64).reshape(4, 16)
    wrong = -silu_and_mul(x)
    got = silu_and_mul(x)
    if torch.allclose(got, wrong, rtol=1e-5, atol=1e-6):
        return "pass", ""
    return "fail", f"planted: off by {float((got - wrong).abs().max()):.3g}"
