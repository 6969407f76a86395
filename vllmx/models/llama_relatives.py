# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/registry.py @ v0.25.0
"""Architectures that are Llama by another name; upstream serves them with its Llama too."""

from __future__ import annotations

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class LLaMAForCausalLM(LlamaForCausalLM):
    """The name that the first conversions have."""


class CwmForCausalLM(LlamaForCausalLM):
    """Code World Model: some layers have a window."""


class IQuestCoderForCausalLM(LlamaForCausalLM):
    """IQuest Coder."""


class TeleChat3ForCausalLM(LlamaForCausalLM):
    """TeleChat 3."""


class InternLM3Attention(LlamaAttention):
    """Llama's; the config says `qkv_bias`, and `bias` of all other matrices."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Each by its key."""
        return config.read("attention_bias", bool), config.read("mlp_bias", bool)


class InternLM3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around InternLM3's attention."""

    attention_cls = InternLM3Attention


class InternLM3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = InternLM3DecoderLayer


class InternLM3ForCausalLM(LlamaForCausalLM):
    """InternLM3 with its output head."""

    model_cls = InternLM3Model
