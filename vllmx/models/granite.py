# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/granite.py @ v0.25.0
"""Granite: Llama with numbers that embedding, scores, residuals and logits are multiplied with."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class GraniteAttention(LlamaAttention):
    """Llama's with a scale of its own."""

    def scale_of(self, config: HFConfig) -> float:
        """The config's."""
        return config.attention_multiplier


class GraniteDecoderLayer(LlamaDecoderLayer):
    """Llama's layer; what attention and MLP add is multiplied first."""

    attention_cls = GraniteAttention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.residual_multiplier = self.residual_of(config)

    def residual_of(self, config: HFConfig) -> float:
        """The config's."""
        return config.residual_multiplier

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        attended = self.self_attn(positions, self.input_layernorm(hidden_states))
        hidden_states = hidden_states + attended * self.residual_multiplier
        made = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + made * self.residual_multiplier, None


class GraniteModel(LlamaModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = GraniteDecoderLayer

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows of the table, multiplied."""
        return self.embed_tokens(input_ids) * self.config.embedding_multiplier


class GraniteForCausalLM(LlamaForCausalLM):
    """Granite with its output head."""

    model_cls = GraniteModel

    def logit_scale(self, config: HFConfig) -> float:
        """Logits are divided by a number of the config."""
        return 1.0 / config.logits_scaling
