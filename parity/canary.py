# SPDX-License-Identifier: Apache-2.0
"""The canary: faults planted for ever, which must be found every time.

Each goes the way of every other case: a provider of an op of vllmx, called by a lane of goldens
with that golden's inputs, judged by the golden, the float64 truth, the floors and the policy, a row
of evidence, the ledger. What they compute is wrong. If the canary's row is ever anything but red,
something on that way lets faults through, and ledger and report say that they can't be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor

from vllmx.ir.ops.activation import silu_and_mul
from vllmx.ir.ops.linear import embedding
from vllmx.ir.select import load_ops

from .op_cells import OpCell
from .op_replay import Lane

CASE, DTYPE = "plain", "f32"


def wrong_sign(x: Tensor) -> Tensor:
    """`silu_and_mul` with the wrong sign: x [tokens, 2 * n] gives [tokens, n]."""
    return -silu_and_mul.fn(x)


def wrong_scale(x: Tensor) -> Tensor:
    """`silu_and_mul` a thousandth too large, which limits that were widened would excuse."""
    return 1.001 * silu_and_mul.fn(x)


def wrong_row(input_ids: Tensor, weight: Tensor) -> Tensor:
    """`embedding` with the rows of the table one too far; nothing is rounded there."""
    return embedding.fn(input_ids, weight.roll(1, dims=0))


PLANTED: tuple[tuple[str, Callable[..., Tensor]], ...] = (
    ("silu_and_mul", wrong_sign),
    ("silu_and_mul", wrong_scale),
    ("embedding", wrong_row),
)


def look() -> tuple[str, str]:
    """(verdict, reason) of the planted faults: pass if a lane accepts any of them, fail if it
    refuses all, skip if it could not judge one."""
    lane, refused = Lane(), []
    for op, fault in PLANTED:
        with _provider(op, fault) as name:
            row = lane.row(OpCell(op, CASE, DTYPE, name, "cpu"))
        if row["verdict"] == "pass":
            return "pass", ""
        if row["verdict"] != "fail":
            return "skip", f"{op} with {name} was not judged: {row['reason']}"
        refused.append(f"{name} of {op} ({row['reason']})")
    return "fail", f"planted, and found: {', '.join(refused)}"


@contextmanager
def _provider(op: str, fault: Callable[..., Tensor]) -> Iterator[str]:
    """Register `fault` as a provider of `op`, whose name it gives, and take it out again."""
    impls, name = load_ops()[op].impls, f"planted_{fault.__name__}"
    impls[name] = replace(impls["torch"], provider=name, fn=fault)
    try:
        yield name
    finally:
        del impls[name]
