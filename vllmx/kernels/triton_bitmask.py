# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/structured_outputs.py @ v0.25.0
"""A Triton kernel that forbids tokens: one bit a token, 32 of them in a word."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

COLUMNS = 4096
"""Logits that a program looks at."""

if SUPPORTED is True:

    @triton.jit
    def _forbid_kernel(
        logits_ptr,
        logits_stride,
        columns,
        rows_ptr,
        mask_ptr,
        mask_stride,
        COLUMNS: tl.constexpr,
    ):
        number = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = column < columns
        words = tl.load(mask_ptr + number * mask_stride + column // 32, mask=inside, other=-1)
        forbidden = ((words >> (column % 32)) & 1) == 0
        row = tl.load(rows_ptr + number).to(tl.int64)
        place = logits_ptr + row * logits_stride + column
        tl.store(place, float("-inf"), mask=inside & forbidden)


def apply_grammar_bitmask(logits: Tensor, bitmask: Tensor, rows: Tensor) -> None:
    """Set to minus infinity what `bitmask` forbids, in place.

    logits: [n, vocab], rows contiguous; bitmask: int32 [m, ceil(vocab / 32)], bit t % 32 of word
    t // 32 clear where token t may not come; rows: int32 [m], the row of logits of each mask.
    """
    columns = logits.shape[1]
    grid = (len(rows), triton.cdiv(columns, COLUMNS))
    _forbid_kernel[grid](
        logits, logits.stride(0), columns, rows, bitmask, bitmask.stride(0), COLUMNS=COLUMNS
    )
