# SPDX-License-Identifier: Apache-2.0
"""The truth of a case: its op's float64 function on the case's own arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from . import gdn_truth, moe_truth, sampler_truth
from .dtypes import Array
from .truth64 import TRUTH, Outputs

# These register theirs with it.
assert gdn_truth.TRUTH is moe_truth.TRUTH is sampler_truth.TRUTH is TRUTH


def truth_of(op: str, arguments: Mapping[str, Any]) -> Outputs | None:
    """The outputs in float64 (integers as they are); None for an op whose meaning is its golden."""
    if op not in TRUTH:
        return None
    given = {k: v.values() if isinstance(v, Array) else v for k, v in arguments.items()}
    # Infinities among the inputs are meant.
    with np.errstate(all="ignore"):
        return TRUTH[op](**given)


def symbols_of(op: str) -> list[str]:
    """The symbols of the truth, for the closure."""
    if op not in TRUTH:
        return []
    module = TRUTH[op].__module__.rpartition(".")[2]
    return [f"parity/{module}.py:{op}"]
