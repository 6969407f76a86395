# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mixtral.py @ v0.25.0
"""Mixtral: Llama whose MLPs are experts, two of them a token."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k, moe_activation
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel


class MixtralMoE(nn.Module):
    """A router and its experts, whose shares always add up to one."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_local_experts", int)
        self.gate = ReplicatedLinear(
            hidden, experts, vllm_config=vllm_config, ops=ops, prefix=f"{prefix}.gate"
        )
        self.experts = FusedMoE(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            config.intermediate_size,
            ops,
            activation=moe_activation(config.hidden_act, config.origin),
            ckpt_names=("w1", "w2", "w3"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.gate(x))


class MixtralDecoderLayer(nn.Module):
    """Attention and experts, each normed before, with the residual carried along."""

    def __init__(self, config: HFConfig, *, prefix: str, **shared: Any) -> None:
        super().__init__()
        norm = (config.hidden_size, config.rms_norm_eps, shared["ops"])
        self.self_attn = LlamaAttention(config, prefix=f"{prefix}.self_attn", **shared)
        self.block_sparse_moe = MixtralMoE(config, prefix=f"{prefix}.block_sparse_moe", **shared)
        self.input_layernorm = RMSNorm(*norm)
        self.post_attention_layernorm = RMSNorm(*norm)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.block_sparse_moe(hidden_states), residual


class MixtralModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = MixtralDecoderLayer


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral with its output head."""

    model_cls = MixtralModel
