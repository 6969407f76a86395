# SPDX-License-Identifier: Apache-2.0
"""Provider `flashinfer`: norms, activation and rotation of the package flashinfer, for a GPU.

The package takes seconds to import and compiles a kernel when it is first called.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.activation import silu_and_mul
from vllmx.ir.ops.layernorm import WHOLE_ROWS_ONLY, fused_add_rms_norm, rms_norm, whole_rows_where
from vllmx.ir.ops.rotary import rotary_embedding
from vllmx.platform import has, has_nvcc

HEAD_SIZES = (64, 128, 256)
NEEDS_WEIGHT = "multiplies with a weight, of which these norms have none"
DTYPES = (torch.float16, torch.bfloat16)


def missing() -> str | None:
    """What FlashInfer lacks in this installation, or None."""
    if not has("flashinfer"):
        return "the package flashinfer-python is not installed"
    if not (has_nvcc() or has("flashinfer_jit_cache")):
        return "it compiles its kernels and finds no nvcc; install CUDA's or flashinfer-jit-cache"
    return None if has("triton") else "the package triton is not installed"


@cache
def library() -> Any:
    """The package, imported when an op first runs."""
    return importlib.import_module("flashinfer")


def takes_halves(context: OpContext) -> bool | str:
    """A `supports`: a GPU and 16-bit activations."""
    if context.device != "cuda":
        return f"runs on a GPU, not on {context.device}"
    if context.dtype not in DTYPES:
        return f"computes in float16 and bfloat16, not in {context.dtype}"
    return True


def _takes_rows(context: OpContext) -> bool | str:
    hidden_size = context.facts.get("hidden_size", 8)
    if hidden_size % 8:
        return f"loads 16 bytes at a time, into which rows of {hidden_size} do not fit"
    return takes_halves(context)


def _weighted_rows(context: OpContext) -> bool | str:
    return _takes_rows(context) if context.facts.get("has_weight", True) else NEEDS_WEIGHT


def _takes_heads(context: OpContext) -> bool | str:
    size = context.facts.get("head_size", HEAD_SIZES[0])
    if size not in HEAD_SIZES:
        return f"rotates heads of {', '.join(map(str, HEAD_SIZES))}, not of {size}"
    return takes_halves(context)


SUPPORTED: bool | str = missing() or True


@rms_norm.register_impl(
    "flashinfer", supported=SUPPORTED, supports=whole_rows_where(_weighted_rows)
)
def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    if weight is None or variance_size is not None:
        raise ValueError(NEEDS_WEIGHT if weight is None else WHOLE_ROWS_ONLY)
    rows = x.reshape(-1, x.shape[-1])
    return library().rmsnorm(rows, weight.to(x.dtype), epsilon).view(x.shape)


@fused_add_rms_norm.register_impl(
    "flashinfer", supported=SUPPORTED, supports=whole_rows_where(_weighted_rows)
)
def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    if weight is None or variance_size is not None:
        raise ValueError(NEEDS_WEIGHT if weight is None else WHOLE_ROWS_ONLY)
    rows, residual = (t.contiguous().view(-1, t.shape[-1]) for t in (x, x_residual))
    library().fused_add_rmsnorm(rows, residual, weight.to(x.dtype), epsilon)
    return rows.view(x.shape), residual.view(x.shape)


@silu_and_mul.register_impl("flashinfer", supported=SUPPORTED, supports=_takes_rows)
def _silu_and_mul(x: Tensor) -> Tensor:
    return library().silu_and_mul(x.contiguous())


@rotary_embedding.register_impl("flashinfer", supported=SUPPORTED, supports=_takes_heads)
def _rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    angles = cos_sin_cache.to(torch.float32)
    # It always rotates both; where there is no key, one head of the query is rotated twice.
    other = query.reshape(len(query), -1)[:, :head_size] if key is None else key.flatten(1)
    rotated = library().apply_rope_with_cos_sin_cache(
        positions, query.flatten(1), other.contiguous(), head_size, angles, is_neox_style
    )
    turned = rotated[0].view(query.shape)
    return turned, None if key is None else rotated[1].view(key.shape)
