# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/afmoe.py @ v0.25.0
"""AFMoE (Trinity): norms on both sides, gated attention, full layers without rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import check_groups
from vllmx.layers.linear import ColumnParallelLinear
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.dense import SandwichDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index


class AfmoeAttention(Qwen3Attention):
    """Normed queries and keys, rotated in layers with a window; what comes out is gated."""

    def __init__(self, config: HFConfig, *, prefix: str, **shared: Any) -> None:
        super().__init__(config, prefix=prefix, **shared)
        self.output_gate = ColumnParallelLinear(
            config.hidden_size, self.q_size, prefix=f"{prefix}.output_gate", **shared
        )
        self._gate = shared["ops"].bind("mul_sigmoid")

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None in full layers."""
        if config.layer_types[layer] == "full_attention":
            return None
        return super().rope_of(config, layer, max_model_len, ops)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        qkv, gate = self.qkv_proj(hidden_states), self.output_gate(hidden_states)
        if self.fused_qkv is not None:
            return self.o_proj(self._gate(self.fused_qkv.attend(positions, qkv), gate))
        qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
        q, k = self.prepare(positions, qk)
        return self.o_proj(self._gate(self.attn(q, k, v), gate))


def afmoe_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first num_dense_layers layers, then experts."""
    if layer_index(prefix) < config.read("num_dense_layers", int):
        return LlamaMLP(config, prefix=prefix, **shared)
    experts, inner = config.read("num_experts", int), config.read("moe_intermediate_size", int)
    groups, kept = config.read("n_group", int), config.read("topk_group", int)
    check_groups(groups, kept, experts, config.origin)
    scoring = config.read("score_func", str)
    return SharedExpertsMoE(
        config,
        experts,
        config.read("num_experts_per_tok", int),
        inner,
        inner * config.read("num_shared_experts", int),
        prefix=prefix,
        correction_bias=True,
        renormalize=config.read("route_norm", bool) and scoring == "sigmoid",
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        scoring_func=scoring,
        routed_scaling_factor=config.read("route_scale", float),
        **shared,
    )


class AfmoeDecoderLayer(SandwichDecoderLayer):
    """Attention and experts, each normed before and after."""

    attention_cls = AfmoeAttention
    mlp_cls = staticmethod(afmoe_mlp)


class AfmoeModel(LlamaModel):
    """Embedding, multiplied if mup_enabled; layers, final norm."""

    layer_cls = AfmoeDecoderLayer

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows of the table, times the root of their width if the config says so."""
        rows = self.embed_tokens(input_ids)
        return rows * self.config.hidden_size**0.5 if self.config.mup_enabled else rows


class AfmoeForCausalLM(LlamaForCausalLM):
    """AFMoE with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            ".self_attn.gate_proj.": ".self_attn.output_gate.",
            ".mlp.router.gate.": ".mlp.gate.",
            ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".pre_mlp_layernorm.": ".pre_feedforward_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        },
    )
    model_cls = AfmoeModel
