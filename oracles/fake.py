# SPDX-License-Identifier: Apache-2.0
"""Oracle for tests of the harness: a few ops in torch, and answers that are wrong on request.

`python -m oracles.fake JOB OUT`. The op `unsteady` gives other bits on every call, `absent` fails.
"""

from __future__ import annotations

import itertools
import sys
from typing import Literal

import torch

from oracles.op_job import Oracle, Tensors, main


def available() -> Literal[True] | str:
    """Always."""
    return True


ORACLE = Oracle("fake", "1", available)
_COUNTER = itertools.count()


@ORACLE.lane("rms_norm", "fake", "oracles.fake.rms_norm")
def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None
) -> Tensors:
    """The norm, rounded once."""
    wide = x.double()
    part = wide if variance_size is None else wide[..., :variance_size]
    wide = wide / (part.square().mean(-1, keepdim=True) + epsilon).sqrt()
    return {"out": (wide if weight is None else wide * weight.double()).to(x.dtype)}


@ORACLE.lane("embedding", "fake", "oracles.fake.embedding")
def embedding(input_ids: torch.Tensor, weight: torch.Tensor) -> Tensors:
    """Rows of weight."""
    return {"out": weight[input_ids.long()]}


@ORACLE.lane("unsteady", "fake", "oracles.fake.unsteady")
def unsteady(x: torch.Tensor) -> Tensors:
    """x plus the number of the call."""
    return {"out": x + next(_COUNTER)}


@ORACLE.lane("absent", "fake", "oracles.fake.absent")
def absent(x: torch.Tensor) -> Tensors:
    """Never answers."""
    raise RuntimeError("this op can't be asked")


if __name__ == "__main__":
    sys.exit(main(ORACLE))
