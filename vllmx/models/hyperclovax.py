# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/hyperclovax.py @ v0.25.0
"""HyperCLOVA X: Granite whose attention and MLP may be normed after as well as before."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.granite import (
    GraniteAttention,
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
)
from vllmx.models.hf_config import HFConfig


class HyperCLOVAXAttention(GraniteAttention):
    """Llama's; the scale of scores may be left out."""

    def scale_of(self, config: HFConfig) -> float:
        """The config's, else Llama's."""
        told = config.read("attention_multiplier", (float, type(None)), None)
        return config.head_dim**-0.5 if told is None else told


class HyperCLOVAXDecoderLayer(GraniteDecoderLayer):
    """Granite's layer, with `use_post_norm` two more norms in it."""

    attention_cls = HyperCLOVAXAttention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.use_post_norm = config.read("use_post_norm", bool, False)
        if self.use_post_norm:
            self.post_norm1 = self.make_norm(config, shared["ops"])
            self.post_norm2 = self.make_norm(config, shared["ops"])

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        if not self.use_post_norm:
            return super().forward(positions, hidden_states, residual)
        attended = self.self_attn(positions, self.input_layernorm(hidden_states))
        hidden_states = hidden_states + self.post_norm1(attended) * self.residual_multiplier
        made = self.post_norm2(self.mlp(self.post_attention_layernorm(hidden_states)))
        return hidden_states + made * self.residual_multiplier, None


class HyperCLOVAXModel(GraniteModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = HyperCLOVAXDecoderLayer


class HyperCLOVAXForCausalLM(GraniteForCausalLM):
    """HyperCLOVA X with its output head."""

    model_cls = HyperCLOVAXModel

    def logit_scale(self, config: HFConfig) -> float:
        """A number of the config, by which logits are multiplied."""
        return config.logits_scaling
