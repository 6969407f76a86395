# SPDX-License-Identifier: Apache-2.0
"""Lanes of `vllm_ops`: upstream's mixture of experts on a CPU.

Registers with the oracle of oracles/vllm_ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oracles import vllm_ops
from oracles.op_job import Tensors
from oracles.vllm_ops import LAYERS, ORACLE

CPU = f"{LAYERS}.fused_moe.cpu_fused_moe"


@ORACLE.lane("topk_softmax", "cpu-select-experts", f"{CPU}.select_experts")
def topk_softmax(gating_output: Tensor, topk: int, renormalize: bool) -> Tensors:
    """What the CPU's experts ask, in the order of the weights."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import select_experts

    vllm_ops._kernels()
    weights, ids = select_experts(gating_output, gating_output, topk, False, renormalize)
    order = weights.argsort(dim=1, descending=True)
    return {"weights": weights.gather(1, order), "ids": ids.gather(1, order)}


@ORACLE.lane("grouped_topk", "cpu-grouped-topk", f"{CPU}.grouped_topk")
def grouped_topk(
    gating_output: Tensor, e_score_correction_bias: Tensor | None, **how: Any
) -> Tensors:
    """What the CPU's experts ask where groups or a bias have a say, in the order of the choice."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import grouped_topk

    return _in_order_of_choice(grouped_topk, gating_output, e_score_correction_bias, how)


@ORACLE.lane("grouped_topk", "layer-native", f"{LAYERS}.fused_moe.router.grouped_topk_router")
def grouped_topk_native(
    gating_output: Tensor, e_score_correction_bias: Tensor | None, **how: Any
) -> Tensors:
    """The torch code of the layer for every device."""
    if gating_output.dtype != torch.float32:
        raise ValueError("it scores in the logits' dtype, which is to be float32")
    from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import grouped_topk

    fn = getattr(grouped_topk, "__wrapped__", grouped_topk)
    return _in_order_of_choice(fn, gating_output, e_score_correction_bias, how)


def _in_order_of_choice(
    fn: Any, logits: Tensor, bias: Tensor | None, how: dict[str, Any]
) -> Tensors:
    weights, ids = fn(logits, logits, e_score_correction_bias=bias, **how)
    wide = logits.float()
    scores = wide.sigmoid() if how["scoring_func"] == "sigmoid" else wide.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    order = choice.gather(1, ids.long()).argsort(dim=1, descending=True)
    return {"weights": weights.gather(1, order), "ids": ids.gather(1, order)}


def _layer(**tensors: Tensor | None) -> Any:
    layer = torch.nn.Module()
    for name, tensor in tensors.items():
        if tensor is not None:
            setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    return layer


def _interleaved(tensor: Tensor | None) -> Tensor | None:
    """Rows of two halves, one of each in turn: how upstream takes gpt-oss's experts."""
    if tensor is None:
        return None
    gate, up = tensor.chunk(2, dim=1)
    return torch.stack((gate, up), dim=2).flatten(1, 2).contiguous()


def _experts(torch_only: bool) -> Any:
    def compute(
        hidden_states: Tensor,
        w13_weight: Tensor,
        w2_weight: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: str = "silu",
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
    ) -> Tensors:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        vllm_ops._kernels()
        experts = len(w13_weight)
        if activation == "swigluoai_uninterleave":
            activation = "swigluoai"
            first, w13_bias = _interleaved(w13_weight), _interleaved(w13_bias)
            assert first is not None
            w13_weight = first
        layer = _layer(
            w13_weight=w13_weight, w2_weight=w2_weight, w13_bias=w13_bias, w2_bias=w2_bias
        )
        made = CPUFusedMOE.__new__(CPUFusedMOE) if torch_only else CPUFusedMOE(layer)
        run = made.forward_torch if torch_only else made.forward_method
        if torch_only:
            made.init_moe_torch(layer)
        args = (topk_weights, topk_ids, MoEActivation.from_str(activation), experts)
        return {"out": run(layer, hidden_states, *args)}

    return compute


ORACLE.lane("fused_experts", "cpu-fused-moe", f"{CPU}.CPUFusedMOE.forward_method")(_experts(False))
ORACLE.lane("fused_experts", "cpu-torch", f"{CPU}.CPUFusedMOE.forward_torch")(_experts(True))
