# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen2_moe.py @ v0.25.0
"""Qwen2 MoE: Qwen2 with experts, and one expert that all tokens share, in its layers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k, moe_activation
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from vllmx.models.utils import layer_index


class Qwen2MoeSparseMoeBlock(nn.Module):
    """Experts that the router chooses, and one that every token takes as far as its gate opens."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_experts", int)
        top_k = check_top_k(config.read("num_experts_per_tok", int), experts, config.origin)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.gate = ReplicatedLinear(hidden, experts, prefix=f"{prefix}.gate", **shared)
        self.experts = FusedMoE(
            experts,
            top_k,
            hidden,
            config.read("moe_intermediate_size", int),
            ops,
            config.read("norm_topk_prob", bool, True),
            activation=moe_activation(config.hidden_act, config.origin),
        )
        self.shared_expert: LlamaMLP | None = None
        inner = config.read("shared_expert_intermediate_size", int, 0)
        if inner > 0:
            self.shared_expert = LlamaMLP(
                config, intermediate_size=inner, prefix=f"{prefix}.shared_expert", **shared
            )
            self.shared_expert_gate = ReplicatedLinear(
                hidden, 1, prefix=f"{prefix}.shared_expert_gate", **shared
            )
        self._gate = ops.bind("mul_sigmoid")

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        routed = self.experts(x, self.gate(x))
        if self.shared_expert is None:
            return routed
        own = self.shared_expert(x)
        return routed + self._gate(own, self.shared_expert_gate(x).expand_as(own))


def qwen_moe_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts, or one MLP in the layers that the config excepts from them."""
    index = layer_index(prefix)
    dense = config.read("mlp_only_layers", (list, type(None)), None) or []
    sparse = config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0
    if sparse and index not in dense:
        return Qwen2MoeSparseMoeBlock(config, prefix=prefix, **shared)
    return LlamaMLP(config, prefix=prefix, **shared)


class Qwen2MoeAttention(LlamaAttention):
    """Llama's attention with biases of queries, keys and values."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Those of qkv_bias; the output has none."""
        return config.read("qkv_bias", bool, True), False


class Qwen2MoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with biased attention and, as the config says, experts."""

    attention_cls = Qwen2MoeAttention
    mlp_cls = staticmethod(qwen_moe_mlp)


class Qwen2MoeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Qwen2MoeDecoderLayer


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """Qwen2 MoE with its output head."""

    model_cls = Qwen2MoeModel
