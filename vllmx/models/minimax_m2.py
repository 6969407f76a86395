# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/minimax_m2.py @ v0.25.0
"""MiniMax-M2: OLMoE's attention, partly rotated; experts by sigmoid, with a bias for the choice.

Layers for drafting, which a checkpoint has behind the model's own, are left out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.models.glm4_moe import Glm4MoeForCausalLM
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaModel
from vllmx.models.olmoe import OlmoeAttention
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


class MiniMaxM2Attention(OlmoeAttention):
    """Queries are normed over all heads at once, and so are keys."""

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Over the first rotary_dim elements of a head, where the rope parameters don't say."""
        rope = dict(config.rope_parameters)
        if "partial_rotary_factor" not in rope and "rotary_dim" in config:
            rope["rope_dim"] = config.read("rotary_dim", int)
        return rope


def minimax_m2_moe(config: HFConfig, **shared: Any) -> nn.Module:
    """Experts, chosen with a bias where use_routing_bias says so."""
    return SharedExpertsMoE(
        config,
        config.read("num_local_experts", int),
        config.read("num_experts_per_tok", int),
        config.intermediate_size,
        float_gate=True,
        correction_bias=config.read("use_routing_bias", bool, True),
        scoring_func=config.read("scoring_func", str, "sigmoid"),
        ckpt_names=("w1", "w2", "w3"),
        **shared,
    )


class MiniMaxM2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around MiniMax-M2's attention and experts."""

    attention_cls = MiniMaxM2Attention
    mlp_cls = staticmethod(minimax_m2_moe)


class MiniMaxM2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = MiniMaxM2DecoderLayer


class MiniMaxM2ForCausalLM(Glm4MoeForCausalLM):
    """MiniMax-M2 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            ".block_sparse_moe.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".block_sparse_moe.": ".mlp.",
        },
    )
    model_cls = MiniMaxM2Model
