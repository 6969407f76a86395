# SPDX-License-Identifier: Apache-2.0
"""Sketches: a long row of activations as 64 numbers whose distances are the rows' distances.

A row is multiplied by a matrix of +1 and -1 drawn from counter bits, over 8, the root of the
number of columns: the expected length of a sketch is the length of its row. Linear, so a scale or
a sum shows in it. Used by the oracles of models and by whoever compares with them; numpy only.
"""

from __future__ import annotations

from functools import cache

import numpy as np

COLUMNS = 64
KEY = np.array([0x766C6C6D78, 0x736B65746368], dtype=np.uint64)
"""The counter's key: the letters of vllmx and of sketch."""


@cache
def signs(width: int) -> np.ndarray:
    """float64 [width, 64] of +1 and -1."""
    words = np.random.Philox(key=KEY).random_raw(width).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8).reshape(width, 8), axis=1, bitorder="little")
    return bits.astype(np.float64) * 2.0 - 1.0


def sketch(rows: np.ndarray) -> np.ndarray:
    """rows: [..., width] of any float dtype -> float32 [..., 64]."""
    wide = rows.astype(np.float64)
    return (wide @ signs(rows.shape[-1]) / np.sqrt(COLUMNS)).astype(np.float32)
