# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/ernie45.py @ v0.25.0
"""ERNIE 4.5, dense: Llama rotated in pairs."""

from __future__ import annotations

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class Ernie4_5Attention(LlamaAttention):
    """Llama's, but neighbours of a head are a pair."""

    is_neox_style = False

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """`use_bias`, on both sides."""
        return config.use_bias, config.use_bias


class Ernie4_5DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around ERNIE's attention."""

    attention_cls = Ernie4_5Attention


class Ernie4_5Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Ernie4_5DecoderLayer


class Ernie4_5ForCausalLM(LlamaForCausalLM):
    """ERNIE 4.5 with its output head."""

    model_cls = Ernie4_5Model
