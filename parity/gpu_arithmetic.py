# SPDX-License-Identifier: Apache-2.0
"""Gives Triton's interpreter a GPU's arithmetic where its own is another.

It cuts float32 to bfloat16 where a GPU rounds to nearest, and multiplies in float32 where a kernel
asks for TF32. A tensor core ignores the 13 lowest bits of what it takes for TF32, and so do we.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton import language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter


def _to_bfloat16(data: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16, uint16."""
    values = torch.from_numpy(np.ascontiguousarray(data))
    return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def _tf32(data: np.ndarray) -> np.ndarray:
    kept = data.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return kept.view(np.float32)


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Until the context ends."""
    builder: Any = interpreter.InterpreterBuilder
    convert, dot = interpreter._convert_float, builder.create_dot

    def converted(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            return _to_bfloat16(data)
        return convert(data, source, target, mode)

    def product(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32 and a.dtype == tl.float32:
            a, b = (interpreter.TensorHandle(_tf32(x.data), x.dtype) for x in (a, b))
        return dot(self, a, b, d, precision, *rest)

    interpreter._convert_float, builder.create_dot = converted, product
    try:
        yield
    finally:
        interpreter._convert_float, builder.create_dot = convert, dot
