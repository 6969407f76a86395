# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/glm4.py @ v0.25.0
"""GLM and GLM-4: Llama with half of a head rotated in pairs; GLM-4 norms before and after."""

from __future__ import annotations

from vllmx.models.dense import SandwichDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


class GlmAttention(LlamaAttention):
    """Biases before it and none after; rotated in pairs."""

    is_neox_style = False

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """attention_bias, and none after."""
        return config.attention_bias, False


class GlmDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around GLM's attention."""

    attention_cls = GlmAttention


class GlmModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = GlmDecoderLayer


class GlmForCausalLM(LlamaForCausalLM):
    """GLM with its output head; gate and up are one matrix in a checkpoint."""

    model_cls = GlmModel


class Glm4DecoderLayer(SandwichDecoderLayer):
    """Attention and MLP, each normed before and after."""

    attention_cls = GlmAttention


class Glm4Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Glm4DecoderLayer


class Glm4ForCausalLM(LlamaForCausalLM):
    """GLM-4 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=LLAMA_MAPPER.stacked,
        renamed={
            ".post_attention_layernorm.": ".pre_feedforward_layernorm.",
            ".post_self_attn_layernorm.": ".post_attention_layernorm.",
            ".post_mlp_layernorm.": ".post_feedforward_layernorm.",
        },
    )
    model_cls = Glm4Model
