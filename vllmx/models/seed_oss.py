# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/seed_oss.py @ v0.25.0
"""Seed-OSS: Llama whose biases before and after attention are two keys of the config."""

from __future__ import annotations

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class SeedOssAttention(LlamaAttention):
    """Llama's."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Each by its key."""
        return config.attention_bias, config.attention_out_bias


class SeedOssDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Seed-OSS's attention."""

    attention_cls = SeedOssAttention


class SeedOssModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = SeedOssDecoderLayer


class SeedOssForCausalLM(LlamaForCausalLM):
    """Seed-OSS with its output head."""

    model_cls = SeedOssModel
