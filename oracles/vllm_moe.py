# SPDX-License-Identifier: Apache-2.0
"""Oracle: upstream's mixture of experts on a CPU.

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


def _layer(w13_weight: Tensor, w2_weight: Tensor) -> Any:
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(w13_weight, requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(w2_weight, requires_grad=False)
    return layer


def _experts(torch_only: bool) -> Any:
    def compute(
        hidden_states: Tensor,
        w13_weight: Tensor,
        w2_weight: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
    ) -> Tensors:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

        vllm_ops._kernels()
        layer, experts = _layer(w13_weight, w2_weight), len(w13_weight)
        made = CPUFusedMOE.__new__(CPUFusedMOE) if torch_only else CPUFusedMOE(layer)
        run = made.forward_torch if torch_only else made.forward_method
        if torch_only:
            made.init_moe_torch(layer)
        args = (topk_weights, topk_ids, MoEActivation.SILU, experts)
        return {"out": run(layer, hidden_states, *args)}

    return compute


ORACLE.lane("fused_experts", "cpu-fused-moe", f"{CPU}.CPUFusedMOE.forward_method")(_experts(False))
ORACLE.lane("fused_experts", "cpu-torch", f"{CPU}.CPUFusedMOE.forward_torch")(_experts(True))
