# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/glm4_moe.py @ v0.25.0
"""GLM-4 MoE: sigmoid scores with a bias for the choice, an expert that all tokens share.

Half of each head is rotated; the first layers have one MLP. Layers for drafting, which a
checkpoint has behind the model's own, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_groups, check_top_k, moe_activation
from vllmx.layers.gate_linear import GateLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.utils import layer_index


class Glm4MoE(nn.Module):
    """Experts of the best groups, and those that every token takes."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("n_routed_experts", int)
        inner = config.read("moe_intermediate_size", int)
        groups, kept = config.read("n_group", int), config.read("topk_group", int)
        check_groups(groups, kept, experts, config.origin)
        self.gate = GateLinear(hidden, experts, ops, correction_bias=True)
        self.experts = FusedMoE(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            inner,
            ops,
            config.read("norm_topk_prob", bool),
            use_grouped_topk=True,
            num_expert_group=groups,
            topk_group=kept,
            scoring_func="sigmoid",
            routed_scaling_factor=config.read("routed_scaling_factor", float),
            e_score_correction_bias=self.gate.e_score_correction_bias,
            activation=moe_activation(config.hidden_act, config.origin),
        )
        self.shared_experts: LlamaMLP | None = None
        if count := config.read("n_shared_experts", (int, type(None))):
            self.shared_experts = LlamaMLP(
                config,
                intermediate_size=inner * count,
                vllm_config=vllm_config,
                ops=ops,
                prefix=f"{prefix}.shared_experts",
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        routed = self.experts(x, self.gate(x))
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


class Glm4MoeAttention(LlamaAttention):
    """Llama's attention; attention_bias is not of the output."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Those of attention_bias, for queries, keys and values alone."""
        return config.read("attention_bias", bool), False


class Glm4MoeNormedAttention(Qwen3Attention):
    """The same with normed queries and keys."""

    biases = Glm4MoeAttention.biases


def glm4_moe_attention(config: HFConfig, **shared: Any) -> nn.Module:
    """Attention as use_qk_norm has it."""
    normed = config.read("use_qk_norm", bool)
    return (Glm4MoeNormedAttention if normed else Glm4MoeAttention)(config, **shared)


def glm4_moe_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first first_k_dense_replace layers, then experts."""
    dense = layer_index(prefix) < config.read("first_k_dense_replace", int)
    return (LlamaMLP if dense else Glm4MoE)(config, prefix=prefix, **shared)


class Glm4MoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around GLM's attention and experts."""

    attention_cls = staticmethod(glm4_moe_attention)
    mlp_cls = staticmethod(glm4_moe_mlp)


class Glm4MoeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Glm4MoeDecoderLayer


class Glm4MoeForCausalLM(LlamaForCausalLM):
    """GLM-4 MoE with its output head."""

    model_cls: type[nn.Module] = Glm4MoeModel

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load a checkpoint's (name, tensor) pairs; CheckpointError where they don't fit."""
        first = self.config.num_hidden_layers
        count = self.config.read("num_nextn_predict_layers", int, 0)
        drafting = tuple(f"model.layers.{first + i}." for i in range(count))
        super().load_weights((name, w) for name, w in weights if not name.startswith(drafting))
