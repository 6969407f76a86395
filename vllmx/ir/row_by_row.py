# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/batch_invariant.py @ v0.25.0
"""The plainest way to results that do not depend on the batch: a call for each row."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def row_by_row(fn: Callable[..., Any], *rows: str) -> Callable[..., Any]:
    """`fn` called for each row of the arguments named `rows` alone, and its results put together.

    rows: those that have a row for each token in their first dimension; default: the first
    argument. A library may add up a row of many in another order than a row alone, by their
    number or by where they lie in memory; a copy of one row is always the same to it.
    """
    signature = inspect.signature(fn)
    names = rows or (next(iter(signature.parameters)),)

    @wraps(fn)
    def each(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        count = len(given[names[0]])
        if count == 0:
            return fn(**given)
        return _joined([fn(**_row(given, names, i)) for i in range(count)])

    return each


def _row(given: dict[str, Any], names: tuple[str, ...], i: int) -> dict[str, Any]:
    alone = {name: given[name][i : i + 1].clone() for name in names if given[name] is not None}
    return {**given, **alone}


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(parts)
    if isinstance(parts[0], tuple):
        return tuple(_joined(list(part)) for part in zip(*parts, strict=True))
    assert all(part is None for part in parts)
    return None
