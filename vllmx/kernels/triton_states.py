# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/mamba_utils.py (precopy_mamba_align_fused_kernel) @ v0.25.0
"""A Triton kernel that copies recurrent states from block to block, of all layers in one launch."""

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

BLOCK = 2048
"""Numbers that a program moves."""


if SUPPORTED is True:

    @triton.jit
    def _copy_states_kernel(
        addresses_ptr,
        groups_ptr,
        blocks_ptr,
        num_copies,
        page_stride,
        count,
        BLOCK: tl.constexpr,
    ):
        layer = tl.program_id(0)
        copy = tl.program_id(1)
        i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        source_ptr = blocks_ptr + tl.load(groups_ptr + layer) * 2 * num_copies + copy
        source = tl.load(source_ptr).to(tl.int64)
        target = tl.load(source_ptr + num_copies).to(tl.int64)
        pages = tl.load(addresses_ptr + layer).to(tl.pointer_type(tl.int32))
        inside = i < count
        states = tl.load(pages + source * page_stride + i, mask=inside, other=0)
        tl.store(pages + target * page_stride + i, states, mask=inside)


def copy_states(
    addresses: Tensor, groups: Tensor, blocks: Tensor, page_stride: int, count: int
) -> None:
    """Copy the states in blocks[g, 0] to blocks[g, 1] in each layer of group g.

    addresses: int64 [layers], where the pages of each layer begin; groups: int32 [layers], rows of
    `blocks`, int32 [groups, 2, copies], of which no target is a source; page_stride and count, in
    32-bit numbers: from page to page, and what a page holds.
    """
    num_copies = blocks.shape[2]
    grid = (len(addresses), num_copies, triton.cdiv(count, BLOCK))
    _copy_states_kernel[grid](
        addresses, groups, blocks, num_copies, page_stride, count, BLOCK=BLOCK
    )
