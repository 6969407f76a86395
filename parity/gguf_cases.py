# SPDX-License-Identifier: Apache-2.0
"""Witness blocks of every GGUF type that vllmx expands: any bytes, any finite scale."""

from __future__ import annotations

import numpy as np

from .inputs import Arguments, CaseTable, Maker

CASES = CaseTable()

# name -> (ggml's number, block elements, block bytes, offsets of float16 fields in a block)
BLOCKS: dict[str, tuple[int, int, int, tuple[int, ...]]] = {
    "F32": (0, 1, 4, ()),
    "F16": (1, 1, 2, (0,)),
    "BF16": (30, 1, 2, ()),
    "Q4_0": (2, 32, 18, (0,)),
    "Q4_1": (3, 32, 20, (0, 2)),
    "Q5_0": (6, 32, 22, (0,)),
    "Q5_1": (7, 32, 24, (0, 2)),
    "Q8_0": (8, 32, 34, (0,)),
    "Q2_K": (10, 256, 84, (80, 82)),
    "Q3_K": (11, 256, 110, (108,)),
    "Q4_K": (12, 256, 144, (0, 2)),
    "Q5_K": (13, 256, 176, (0, 2)),
    "Q6_K": (14, 256, 210, (208,)),
}


def _blocks(m: Maker, name: str, rows: int, row_elements: int) -> np.ndarray:
    """Random blocks, uint8 [rows, row bytes]; scales of both signs, subnormal ones among them."""
    _, elements, size, scales = BLOCKS[name]
    count = rows * row_elements // elements
    data = m.integers("bytes", 0, 256, count, size).astype(np.uint8)
    if not scales:  # floats: near 1, so that no bit pattern is a NaN
        values = m.normal("floats", count, 1)
        data = m.float(values, name.lower()).data.view(np.uint8).reshape(count, size).copy()
    for offset in scales:
        scale = m.normal(f"scale{offset}", count, std=0.02)
        scale[::5] *= 2.0**-18
        data[:, offset : offset + 2] = scale.astype("<f2")[:, None].view(np.uint8)
    # The first and last block: all bits of the codes clear, and all of them set.
    for block, filler in ((0, 0), (count - 1, 255)):
        if scales and elements > 1:
            kept = {o: data[block, o : o + 2].copy() for o in scales}
            data[block] = filler
            for offset, two in kept.items():
                data[block, offset : offset + 2] = two
    return data.reshape(rows, -1)


def _add(name: str) -> None:
    @CASES.add("dequantize_gguf", name.lower(), cells=("codes all clear and all set", name))
    def _(m: Maker) -> Arguments:
        row = 1024 if BLOCKS[name][1] == 256 else 352
        data = m.ints(_blocks(m, name, 3, row), "u8")
        return {"data": data, "qtype": BLOCKS[name][0], "dtype": m.dtype}


for _name in BLOCKS:
    _add(_name)
