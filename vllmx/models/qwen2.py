# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen2.py @ v0.25.0
"""Qwen2: Llama with biases of queries, keys and values."""

from __future__ import annotations

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class Qwen2Attention(LlamaAttention):
    """Grouped-query attention; biases before it and none after."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Always, whatever the config says: it has no key for them."""
        return True, False


class Qwen2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Qwen2's attention."""

    attention_cls = Qwen2Attention


class Qwen2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Qwen2DecoderLayer


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2 with its output head."""

    model_cls = Qwen2Model
