# SPDX-License-Identifier: Apache-2.0
"""Arrays of the element types that models use, bfloat16 among them, with nothing but numpy.

An `Array` names its type and keeps the stored bits; bfloat16 is kept as uint16. All rounding is
to nearest, ties to even, straight from float64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

STORAGE: dict[str, np.dtype[Any]] = {
    "f64": np.dtype("<f8"),
    "f32": np.dtype("<f4"),
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),
    "i64": np.dtype("<i8"),
    "i32": np.dtype("<i4"),
    "u8": np.dtype("u1"),
    "bool": np.dtype("?"),
}
MANTISSA = {"f64": 52, "f32": 23, "f16": 10, "bf16": 7}
SMALLEST_EXPONENT = {"f64": -1022, "f32": -126, "f16": -14, "bf16": -126}


@dataclass(frozen=True)
class Array:
    """Stored elements and the name of their type."""

    dtype: str
    data: np.ndarray

    def __post_init__(self) -> None:
        assert self.data.dtype == STORAGE[self.dtype], (self.dtype, self.data.dtype)

    @property
    def is_float(self) -> bool:
        """Whether the elements are floats."""
        return self.dtype in MANTISSA

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements."""
        return self.data.shape

    def values(self) -> np.ndarray:
        """The elements: floats as float64, which holds each of them exactly, others as stored."""
        if self.dtype == "bf16":
            return (self.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return self.data.astype(np.float64) if self.is_float else self.data

    def tobytes(self) -> bytes:
        """The elements row by row, little-endian."""
        return np.ascontiguousarray(self.data).tobytes()

    @property
    def sha256(self) -> str:
        """Of type, shape and elements."""
        head = f"{self.dtype}{list(self.shape)}".encode()
        return hashlib.sha256(head + self.tobytes()).hexdigest()


def array(values: np.ndarray, dtype: str) -> Array:
    """`values` rounded to `dtype`."""
    if dtype == "bf16":
        return Array(dtype, _bf16_bits(np.asarray(values, np.float64)))
    with np.errstate(over="ignore"):
        return Array(dtype, np.ascontiguousarray(np.asarray(values).astype(STORAGE[dtype])))


def from_bytes(dtype: str, shape: tuple[int, ...], data: bytes) -> Array:
    """The inverse of `Array.tobytes`; ValueError where the length does not fit."""
    return Array(dtype, np.frombuffer(data, STORAGE[dtype]).reshape(shape))


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """float64 values of `values` after rounding to `dtype`."""
    return array(values, dtype).values()


def ulp(values: np.ndarray, dtype: str) -> np.ndarray:
    """Distance from each float64 value to the next of `dtype`; that of 1 where it isn't finite."""
    finite = np.where(np.isfinite(values), values, 1.0)
    exponent = np.frexp(finite)[1] - 1
    exponent = np.where(finite == 0, SMALLEST_EXPONENT[dtype], exponent)
    return np.ldexp(1.0, np.maximum(exponent, SMALLEST_EXPONENT[dtype]) - MANTISSA[dtype])


def _bf16_bits(values: np.ndarray) -> np.ndarray:
    """Upper halves of float32, rounded once from float64."""
    bits = values.view(np.uint64).copy() if values.ndim else values.reshape(1).view(np.uint64)
    dropped = MANTISSA["f64"] - MANTISSA["bf16"]
    odd = (bits >> np.uint64(dropped)) & np.uint64(1)
    bits = bits + np.uint64((1 << (dropped - 1)) - 1) + odd
    bits &= ~np.uint64((1 << dropped) - 1)
    result = bits.view(np.float64).reshape(values.shape)
    step = 2.0 ** (SMALLEST_EXPONENT["bf16"] - MANTISSA["bf16"])
    small = np.abs(values) < 2.0 ** SMALLEST_EXPONENT["bf16"]
    result = np.where(small, np.rint(values / step) * step, result)
    result = np.where(np.isfinite(values), result, values)
    with np.errstate(over="ignore"):
        return (result.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
