# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/AXK1.py @ v0.25.0
"""A.X K1: DeepSeek V3 with a norm of what the experts return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.deepseek_v2 import (
    DeepseekV2DecoderLayer,
    DeepseekV2ForCausalLM,
    DeepseekV2Model,
)
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP


class AXK1DecoderLayer(DeepseekV2DecoderLayer):
    """DeepSeek's layer; checkpoints have the norm everywhere, and layers with experts use it."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.post_mlp_layernorm = self.make_norm(config, shared["ops"])
        self.is_sparse = not isinstance(self.mlp, LlamaMLP)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        hidden_states, residual = super().forward(positions, hidden_states, residual)
        return self.post_mlp_layernorm(hidden_states) if self.is_sparse else hidden_states, residual


class AXK1Model(DeepseekV2Model):
    """Embedding, layers, final norm."""

    layer_cls = AXK1DecoderLayer


class AXK1ForCausalLM(DeepseekV2ForCausalLM):
    """A.X K1 with its output head."""

    model_cls = AXK1Model
