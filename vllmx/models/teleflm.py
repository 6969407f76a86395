# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/teleflm.py @ v0.25.0
"""Tele-FLM: Llama whose embedding and logits are multiplied, so that sizes share their settings.

Upstream's class makes Llama's embedding, without the multiplier, and is not followed in that.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel


class TeleFLMModel(LlamaModel):
    """Multiplied embedding, layers, final norm."""

    def __init__(self, **shared: Any) -> None:
        super().__init__(**shared)
        scaled = self.config.read("use_mup", bool)
        self.input_mult = self.config.read("input_mult", float) if scaled else 1.0

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows of the table, times input_mult where use_mup says so."""
        rows = self.embed_tokens(input_ids)
        return rows if self.input_mult == 1.0 else rows * self.input_mult


class TeleFLMForCausalLM(LlamaForCausalLM):
    """Tele-FLM with its output head."""

    model_cls = TeleFLMModel

    def logit_scale(self, config: HFConfig) -> float:
        """output_mult for a model of the size that was tuned, less the larger this one is."""
        if not config.read("use_mup", bool):
            return 1.0
        return config.read("output_mult", float) / config.read("mup_scale_factor", float)
