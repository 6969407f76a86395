# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/flashinfer.py (_copy_page_indices_kernel) @ v0.25.0
"""A Triton kernel that writes the pages of all requests one after another, as FlashInfer wants."""

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

BLOCK = 256
"""Pages that a program copies."""


if SUPPORTED is True:

    @triton.jit
    def _join_pages_kernel(
        table_ptr, table_stride, page_start_ptr, indices_ptr, BLOCK: tl.constexpr
    ):
        request = tl.program_id(0)
        start = tl.load(page_start_ptr + request)
        pages = tl.load(page_start_ptr + request + 1) - start
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < pages
        row = table_ptr + request.to(tl.int64) * table_stride
        tl.store(indices_ptr + start + i, tl.load(row + i, mask=inside, other=0), mask=inside)


def join_pages(block_table: Tensor, page_start: Tensor, indices: Tensor) -> None:
    """Write the first pages of each row of `block_table` into `indices`, row after row.

    block_table: int32 [num_reqs, width]; page_start: int32 [num_reqs + 1], where a row's pages
    begin and end; indices: int32, at least page_start[-1].
    """
    num_reqs, width = block_table.shape
    _join_pages_kernel[(num_reqs, triton.cdiv(width, BLOCK))](
        block_table, block_table.stride(0), page_start, indices, BLOCK=BLOCK
    )
