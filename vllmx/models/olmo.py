# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/olmo.py @ v0.25.0
"""OLMo: Llama with norms that have no parameters; queries, keys and values may be clipped."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import LayerNorm
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class OlmoAttention(LlamaAttention):
    """Llama's; what is projected is kept within +- clip_qkv."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        self.clip = config.read("clip_qkv", float, None)
        super().__init__(config, **shared)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        if self.clip is None:
            return super().forward(positions, hidden_states)
        qkv = self.qkv_proj(hidden_states).clamp(-self.clip, self.clip)
        if self.fused_qkv is not None:
            return self.o_proj(self.fused_qkv.attend(positions, qkv))
        qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
        q, k = self.prepare(positions, qk)
        return self.o_proj(self.attn(q, k, v))


class OlmoDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with plain norms."""

    attention_cls = OlmoAttention

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """By mean and variance alone."""
        return LayerNorm(config.hidden_size, 1e-5, ops, has_weight=False, has_bias=False)


class OlmoModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = OlmoDecoderLayer


class OlmoForCausalLM(LlamaForCausalLM):
    """OLMo with its output head."""

    model_cls = OlmoModel
