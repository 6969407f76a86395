# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/registry.py @ v0.25.0
"""Upstream's names of attention backends: those of ours, and those that vllmx lacks."""

from __future__ import annotations

from vllmx.exceptions import UserError

OURS = {
    "CPU_ATTN": "native",
    "FLASHINFER": "flashinfer",
    "TORCH_SDPA": "sdpa",
    "TRITON_ATTN": "triton",
}
"""Upstream's name -> the backend here that does the same work on the same device."""
LACKING = frozenset(
    """
    CUTLASS_MLA FLASHINFER_MLA FLASHINFER_MLA_SPARSE FLASHINFER_MLA_SPARSE_DSV4
    FLASHINFER_MLA_SPARSE_SM120 FLASHMLA FLASHMLA_SPARSE FLASHMLA_SPARSE_DSV4 FLASH_ATTN
    FLASH_ATTN_DIFFKV FLASH_ATTN_MLA FLASH_ATTN_MLA_SPARSE FLEX_ATTENTION HPC_ATTN
    MINIMAX_M3_SPARSE NO_ATTENTION ROCM_AITER_FA ROCM_AITER_MLA ROCM_AITER_MLA_SPARSE
    ROCM_AITER_TRITON_MLA ROCM_AITER_UNIFIED_ATTN ROCM_ATTN ROCM_FLASHMLA_SPARSE_DSV4
    TOKENSPEED_MLA TRITON_ATTN_DIFFKV TRITON_MLA TURBOQUANT XPU_MLA_SPARSE
    """.split()
)


def our_backend(name: str | None) -> str | None:
    """`name`, or the backend of ours that upstream calls so in letters of any case; UserError for
    one of upstream's that vllmx lacks. A name that neither has is left for the engine to refuse."""
    upper = (name or "").upper()
    if upper in LACKING:
        known = ", ".join(f"{ours} (upstream's {theirs})" for theirs, ours in OURS.items())
        raise UserError(
            f"attention.backend={name}: vllmx lacks this backend of upstream's; choose one of "
            f"torch, {known}, or leave it unset."
        )
    return OURS.get(upper, name)
