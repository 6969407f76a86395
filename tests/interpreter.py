# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter as tests want it that compare rows bit by bit."""

from typing import Any

import numpy as np
import pytest

from vllmx.platform import has


def multiply_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter multiplies by NumPy's library, which on CPUs without AVX-512 adds up the last
    rows of a matrix otherwise than the others; tensor cores don't."""
    if not has("triton"):
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        rows = [np.matmul(row[None], b.data, dtype=d.data.dtype) for row in a.data]
        return TensorHandle(np.concatenate(rows) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
