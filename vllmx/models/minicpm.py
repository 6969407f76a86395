# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/minicpm.py @ v0.25.0
"""MiniCPM: Granite whose multipliers follow from the depth and from the width of a base model."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.granite import (
    GraniteAttention,
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
)
from vllmx.models.hf_config import HFConfig


class MiniCPMAttention(GraniteAttention):
    """Llama's."""

    def scale_of(self, config: HFConfig) -> float:
        """The root of a head's size."""
        return config.head_dim**-0.5


class MiniCPMDecoderLayer(GraniteDecoderLayer):
    """Llama's attention; what is added is multiplied by scale_depth over the root of the depth."""

    attention_cls = MiniCPMAttention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        if config.read("num_experts", int, 0):
            raise CheckpointError(f"{config.origin}: num_experts is set, which is not supported.")

    def residual_of(self, config: HFConfig) -> float:
        """scale_depth over the root of the depth."""
        return config.read("scale_depth", float) / config.num_hidden_layers**0.5


class MiniCPMModel(GraniteModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = MiniCPMDecoderLayer

    def embed(self, input_ids: Any, positions: Any) -> Any:
        """Rows of the table, multiplied."""
        return self.embed_tokens(input_ids) * self.config.read("scale_emb", float)


class MiniCPMForCausalLM(GraniteForCausalLM):
    """MiniCPM with its output head."""

    model_cls = MiniCPMModel

    def logit_scale(self, config: HFConfig) -> float:
        """Logits are divided by how often the base model's width fits into this one's."""
        return config.read("dim_model_base", float) / config.hidden_size
