# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen3_5.py @ v0.25.0
"""Qwen3.5 with a mixture of experts in every layer. Text only."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.models.hf_config import HFConfig
from vllmx.models.qwen2_moe import Qwen2MoeSparseMoeBlock
from vllmx.models.qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5ForCausalLM, Qwen3_5Model


class Qwen3_5MoeDecoderLayer(Qwen3_5DecoderLayer):
    """Qwen3.5's layer with experts."""

    def make_mlp(self, config: HFConfig, layer_idx: int, **shared: Any) -> nn.Module:
        """Experts, whatever the layer."""
        return Qwen2MoeSparseMoeBlock(config, **shared)


class Qwen3_5MoeModel(Qwen3_5Model):
    """Embedding, layers, final norm."""

    layer_cls = Qwen3_5MoeDecoderLayer


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Qwen3.5 MoE with its output head."""

    model_cls = Qwen3_5MoeModel


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The text path of Qwen3.5 MoE with eyes."""
