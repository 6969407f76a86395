# SPDX-License-Identifier: Apache-2.0
"""Lanes of `vllm_ops`: ops that join several of upstream's, which are called one after another.

Registers with the oracle of oracles/vllm_ops.py. Upstream has no such op on a CPU; what it calls
in their place are the callables of the ops that they are made of, rounded between them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oracles import vllm_ops
from oracles.op_job import Tensors
from oracles.vllm_ops import IR, LAYERS, ORACLE

GEMM = f"{LAYERS}.utils.default_unquantized_gemm"
PRODUCTS: dict[str, Callable[..., Tensors]] = {
    "unquantized-gemm": vllm_ops.linear,
    "onednn": vllm_ops.linear_onednn,
    "float32-in-order": vllm_ops.linear_in_order,
}
"""Lanes of the product; the first is what upstream's layer calls."""
ATTENTIONS: dict[str, Callable[..., Tensors]] = {
    "cpu-attention": vllm_ops.paged_attention,
    "torch-sdpa": vllm_ops.paged_attention_sdpa,
    "torch-einsum": vllm_ops.paged_attention_einsum,
}


def _add(product: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def compute(x: Tensor, residual: Tensor, weight: Tensor) -> Tensors:
        """The sum is the residual that upstream's norm hands on. It keeps the squares of the
        unrounded sum to itself, so these are torch's, in float32."""
        made = product(x, weight, None)["out"]
        ones = torch.ones(weight.shape[0], dtype=x.dtype)
        total = vllm_ops.fused_add_rms_norm(made, residual, ones, 1e-6, None)["residual"]
        wide = made.float() + residual.float()
        return {"out": total, "squares": wide.square().sum(dim=-1, keepdim=True)}

    return compute


def _norm(product: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def compute(
        x: Tensor, squares: Tensor, norm_weight: Tensor, epsilon: float, weight: Tensor
    ) -> Tensors:
        """The norm takes the squares of x itself."""
        normed = vllm_ops.rms_norm(x, norm_weight, epsilon, None)["out"]
        return product(normed, weight, None)

    return compute


def _gated(product: Callable[..., Tensors]) -> Callable[..., Tensors]:
    norm = _norm(product)

    def compute(**args: Any) -> Tensors:
        return vllm_ops.silu_and_mul(norm(**args)["out"])

    return compute


def _decode(attention: Callable[..., Tensors]) -> Callable[..., Tensors]:
    def compute(
        block_table: Tensor, seq_lens: Tensor, max_seq_len: int, scale: float, **args: Any
    ) -> Tensors:
        """Upstream's attention has no requests without tokens: it is not asked for them, and
        their output is the zero that the op promises."""
        made = vllm_ops.qk_norm_rope_cache(**args, is_neox_style=True)
        out = made.pop("query")
        real = torch.nonzero(seq_lens).flatten()
        query = out.view(len(out), -1, args["key_cache"].shape[-1])[real]
        found = attention(
            query=query,
            **made,
            block_table=block_table[real],
            query_start_loc=torch.arange(len(real) + 1, dtype=torch.int32),
            seq_lens=seq_lens[real],
            scale=scale,
            sliding_window=None,
            soft_cap=None,
        )
        zero = torch.zeros_like(out)
        zero[real] = found["out"].flatten(1)
        return {"out": zero, **made}

    return compute


NORM = f"{IR}.rms_norm.impls[native]"
for _lane, _product in PRODUCTS.items():
    _sum = f"{GEMM}, {IR}.fused_add_rms_norm.impls[native]"
    ORACLE.lane("linear_add", _lane, _sum)(_add(_product))
    ORACLE.lane("rms_norm_linear", _lane, f"{NORM}, {GEMM}")(_norm(_product))
    _all = f"{NORM}, {GEMM}, {LAYERS}.activation.SiluAndMul.forward_native"
    ORACLE.lane("rms_norm_gated_linear", _lane, _all)(_gated(_product))
for _lane, _attention in ATTENTIONS.items():
    _parts = ORACLE.callables["qk_norm_rope_cache"]
    _whole = f"{_parts}, vllm._custom_ops.cpu_attention_with_kv_cache"
    ORACLE.lane("qk_norm_rope_decode", _lane, _whole)(_decode(_attention))
