# SPDX-License-Identifier: Apache-2.0
"""Expands GGUF blocks to floats with torch, whole tensors at a time, on any device.

Each function takes blocks [n, block bytes] (uint8) and returns float32 [n, block elements]. All
arithmetic is in float32 with one rounding an operation, so results equal ggml's bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from vllmx.exceptions import CheckpointError
from vllmx.ir.ggml import BLOCK_SIZES, GGMLType

PLAIN_DTYPES = {
    GGMLType.F32: torch.float32,
    GGMLType.F16: torch.float16,
    GGMLType.BF16: torch.bfloat16,
}
"""Types that hold one float an element."""

CHUNK_ELEMENTS = 1 << 19
"""Elements expanded at a time: temporaries stay in the cache (twice as fast on a large tensor)."""


def dequantize(
    data: torch.Tensor, qtype: GGMLType, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Expand `data` [rows, bytes per row] (uint8) of type `qtype` to [rows, elements] of `dtype`.

    Raises CheckpointError for a type that vllmx cannot expand.
    """
    check_supported(qtype)
    block, block_bytes = BLOCK_SIZES[qtype]
    rows, row_bytes = data.shape
    assert row_bytes % block_bytes == 0, (row_bytes, block_bytes)
    if qtype in PLAIN_DTYPES:
        return data.contiguous().view(PLAIN_DTYPES[qtype]).to(dtype)
    blocks = data.reshape(-1, block_bytes)
    expand, step = _DEQUANTIZERS[qtype], CHUNK_ELEMENTS // block
    if len(blocks) <= step:
        values = expand(blocks).to(dtype)
    else:
        values = torch.empty(len(blocks), block, dtype=dtype, device=data.device)
        for start in range(0, len(blocks), step):
            values[start : start + step] = expand(blocks[start : start + step])
    return values.view(rows, row_bytes // block_bytes * block)


def check_supported(qtype: GGMLType, name: str = "") -> None:
    """Raise CheckpointError, naming the tensor `name`, where `qtype` cannot be expanded."""
    if qtype not in PLAIN_DTYPES and qtype not in _DEQUANTIZERS:
        known = ", ".join(t.name for t in (*PLAIN_DTYPES, *_DEQUANTIZERS))
        where = f"tensor {name!r} is" if name else "a tensor is"
        raise CheckpointError(
            f"{where} stored as {qtype.name}, which vllmx cannot read; supported: {known}."
        )


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(torch.float32)


def _planes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Split bytes [..., w] into their 8/bits fields, lowest first: [..., 8/bits, w]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-2) >> shifts.unsqueeze(-1)) & (2**bits - 1)


def _high_bits(packed: torch.Tensor) -> torch.Tensor:
    """The 32 bits of 4 little-endian bytes [n, 4], moved to bit 4: [n, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1) << 4


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 2:], 4).flatten(1)
    return _half(blocks, 0) * q.to(torch.float32).sub_(8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 4:], 4).flatten(1)
    return q.to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 6:], 4).flatten(1) | _high_bits(blocks[:, 2:6])
    return _half(blocks, 0) * q.to(torch.float32).sub_(16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 8:], 4).flatten(1) | _high_bits(blocks[:, 4:8])
    return q.to(torch.float32).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_half(blocks, 0))


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, qs = blocks[:, :16], blocks[:, 16:80]
    d = _half(blocks, 80) * (scales & 15).to(torch.float32)
    m = _half(blocks, 82) * (scales >> 4).to(torch.float32)
    q = _planes(qs.unflatten(1, (2, 32)), 2).reshape(-1, 16, 16).to(torch.float32)
    return q.mul_(d.unsqueeze(-1)).sub_(m.unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    hmask, qs, packed = blocks[:, :32], blocks[:, 32:96], blocks[:, 96:108]
    # 16 six-bit scales: low nibbles in 8 bytes, the two high bits in 4 bytes.
    low = _planes(packed[:, :8], 4).flatten(1)
    high = _planes(packed[:, 8:], 2).flatten(1)
    scales = (low | (high << 4)).to(torch.float32).sub_(32)
    d = _half(blocks, 108) * scales
    low = _planes(qs.unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    high = _planes(hmask, 1).reshape(-1, 16, 16)
    q = (low | (high << 2)).to(torch.float32).sub_(4)  # a clear mask bit stands for -4
    return q.mul_(d.unsqueeze(-1)).flatten(1)


def _scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight six-bit scales and eight six-bit minima from 12 bytes: two float32 [n, 8]."""
    a, b, c = packed.unflatten(1, (3, 4)).unbind(1)
    scales = torch.cat((a & 63, (c & 15) | ((a >> 2) & 48)), dim=1)
    mins = torch.cat((b & 63, (c >> 4) | ((b >> 2) & 48)), dim=1)
    return scales.to(torch.float32), mins.to(torch.float32)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    d = (_half(blocks, 0) * scales).unsqueeze(-1)
    m = (_half(blocks, 2) * mins).unsqueeze(-1)
    q = _planes(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1, 2)
    return q.to(torch.float32).mul_(d).sub_(m).flatten(1)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, mins = _scales_and_mins(blocks[:, 4:16])
    d = (_half(blocks, 0) * scales).unsqueeze(-1)
    m = (_half(blocks, 2) * mins).unsqueeze(-1)
    low = _planes(blocks[:, 48:].unflatten(1, (4, 32)), 4).flatten(1, 2)
    q = low | (_planes(blocks[:, 16:48], 1) << 4)
    return q.to(torch.float32).mul_(d).sub_(m).flatten(1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _planes(blocks[:, :128].unflatten(1, (2, 64)), 4).reshape(-1, 16, 16)
    high = _planes(blocks[:, 128:192].unflatten(1, (2, 32)), 2).reshape(-1, 16, 16)
    scales = blocks[:, 192:208].view(torch.int8).to(torch.float32)
    d = (_half(blocks, 208) * scales).unsqueeze(-1)
    return (low | (high << 4)).to(torch.float32).sub_(32).mul_(d).flatten(1)


_DEQUANTIZERS: dict[GGMLType, Callable[[torch.Tensor], torch.Tensor]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
