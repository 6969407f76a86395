# SPDX-License-Identifier: Apache-2.0
"""A dense decoder's layers for a few tokens: norms, gates and residuals inside the linear kernels.

The same layers, weights and cache as the model's own forward, in five launches a layer instead of
nine. It serves batches of at most `MAX_TOKENS`, where launches weigh more than arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import REFERENCE
from vllmx.ir.select import OpTable

MAX_TOKENS = 32
MAX_WEIGHT_BYTES = 32 << 20
"""Largest matrix of a layer. What is larger waits for memory and not for launches, and cuBLAS is
faster in the chain of layers: a token of an 8B model took 4.8 ms, 5.8 with this (an H200;
reports/gpu/linear.md)."""
OPS = ("linear_add", "rms_norm_linear", "rms_norm_gated_linear")


class FusedDecoder:
    """Runs `layers` with the three fused ops; `of` says whether that can be."""

    def __init__(self, layers: Iterable[Any], ops: OpTable) -> None:
        impls = {name: ops.choose(name) for name in OPS}
        self.steps = [_steps_of(layer, impls) for layer in layers]

    @classmethod
    def of(cls, layers: Iterable[Any], ops: OpTable) -> FusedDecoder | None:
        """None where an op has no provider but its definition, or a layer is not of this kind."""
        if ops.batch_invariant:
            return None  # its sums are cut by the number of tokens
        if any(ops.choose(name).provider == REFERENCE for name in OPS):
            return None
        if not all(_is_plain(layer) for layer in layers):
            return None
        return cls(layers, ops)

    def __call__(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: [T]; hidden_states: [T, H], the embeddings -> [T, H], before the last norm."""
        total = hidden_states
        squares = torch.linalg.vector_norm(total, dim=-1, keepdim=True, dtype=torch.float32)
        squares = squares.square()
        for qkv, attend, o_proj, gate_up, down_proj in self.steps:
            attended = attend(positions, qkv(total, squares))
            total, squares = o_proj(attended, total)
            total, squares = down_proj(gate_up(total, squares), total)
        return total


def _is_plain(layer: Any) -> bool:
    """Dense weights without biases, none too large, fused queries and keys, silu."""
    attention, mlp = layer.self_attn, layer.mlp
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    return (
        attention.fused_qkv is not None
        and mlp.hidden_act in ("silu", "swish")
        and all(
            linear.packed.dense is not None
            and linear.packed.nbytes <= MAX_WEIGHT_BYTES
            and not linear.has_bias
            for linear in linears
        )
    )


def _steps_of(layer: Any, impls: dict[str, Any]) -> tuple[Callable[..., Any], ...]:
    attention, mlp = layer.self_attn, layer.mlp

    def adds(linear: Any) -> Callable[..., Any]:
        impl = impls["linear_add"]
        weight, run = impl.prepared(linear.packed.dense), impl.fn
        return lambda x, residual: run(x, residual, weight)

    def norms(name: str, norm: Any, linear: Any) -> Callable[..., Any]:
        impl = impls[name]
        weight, run = impl.prepared(linear.packed.dense), impl.fn
        scale, epsilon = norm.weight, norm.variance_epsilon
        return lambda x, squares: run(x, squares, scale, epsilon, weight)

    return (
        norms("rms_norm_linear", layer.input_layernorm, attention.qkv_proj),
        attention.fused_qkv.attend,
        adds(attention.o_proj),
        norms("rms_norm_gated_linear", layer.post_attention_layernorm, mlp.gate_up_proj),
        adds(mlp.down_proj),
    )
