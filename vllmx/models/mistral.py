# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mistral.py @ v0.25.0
"""Mistral: Llama whose layers may have a window; Ministral 3 scales late queries besides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllmx.layers.fused_qkv import FusedQKV
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral with its output head: the window is in the config's layer_types."""


class Ministral3Attention(LlamaAttention):
    """Queries grow with the logarithm of how often the original context fits before them."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        rope = config.rope_parameters
        told = config.read("llama_4_scaling", dict, None)
        if told is not None:  # the same in Mistral's own words
            rope = {**told, "llama_4_scaling_beta": told["beta"]}
        self.beta = rope.get("llama_4_scaling_beta")
        self.original = rope.get("original_max_position_embeddings")
        super().__init__(config, **shared)

    def fused(self, ops: Any) -> FusedQKV | None:
        """None where queries are scaled."""
        return LlamaAttention.fused(self, ops) if self.beta is None else None

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """As Llama's, then the queries times 1 + beta log(1 + floor(position / original))."""
        q, k = super().prepare(positions, qk)
        if self.beta is not None:
            times = torch.floor(positions / self.original)
            q = (q * (1 + self.beta * torch.log(1 + times)).unsqueeze(-1)).to(q.dtype)
        return q, k


class Ministral3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Ministral 3's attention."""

    attention_cls = Ministral3Attention


class Ministral3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Ministral3DecoderLayer


class Ministral3ForCausalLM(LlamaForCausalLM):
    """Ministral 3 with its output head."""

    model_cls = Ministral3Model
