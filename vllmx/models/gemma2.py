# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gemma2.py @ v0.25.0
"""Gemma 2: soft caps, a window in every other layer, norms before and after."""

from __future__ import annotations

from vllmx.models.dense import SandwichDecoderLayer
from vllmx.models.gemma import GemmaDecoderLayer, GemmaForCausalLM, GemmaMLP, GemmaModel
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention


class Gemma2Attention(LlamaAttention):
    """Llama's, whose config has a cap on scores and which layers have a window."""

    def scale_of(self, config: HFConfig) -> float:
        """The config's own, not by the size of a head."""
        return config.query_pre_attn_scalar**-0.5


class Gemma2DecoderLayer(SandwichDecoderLayer):
    """Attention and MLP, each normed before and after."""

    attention_cls = Gemma2Attention
    mlp_cls = GemmaMLP
    make_norm = staticmethod(GemmaDecoderLayer.make_norm)


class Gemma2Model(GemmaModel):
    """Scaled embedding, layers, final norm."""

    layer_cls = Gemma2DecoderLayer


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2 with its (tied) output head, whose logits are capped."""

    model_cls = Gemma2Model
