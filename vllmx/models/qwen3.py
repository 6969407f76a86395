# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen3.py @ v0.25.0
"""Qwen3: Llama with a norm of each query and key head before the rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.ir.select import OpTable
from vllmx.layers.fused_qkv import FusedQKV
from vllmx.layers.layernorm import RMSNorm
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
)


class Qwen3Attention(LlamaAttention):
    """Grouped-query attention with normed queries and keys."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.head_dim = config.head_dim
        self.q_norm = self.head_norm(config, shared["ops"])
        self.k_norm = self.head_norm(config, shared["ops"])
        if self.rotary_emb is not None:
            self.fused_qkv = FusedQKV.of(
                self.attn, self.rotary_emb, shared["ops"], self.q_norm, self.k_norm
            )

    @staticmethod
    def head_norm(config: HFConfig, ops: OpTable) -> RMSNorm:
        """The norm of a head, as the family has it."""
        return RMSNorm(config.head_dim, config.rms_norm_eps, ops)

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Norm each head of qk, [T, q_size + kv_size], then rotate."""
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return (q, k) if self.rotary_emb is None else self.rotary_emb(positions, q, k)


class Qwen3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Qwen3's attention."""

    attention_cls = Qwen3Attention


class Qwen3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Qwen3DecoderLayer


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3 with its output head."""

    model_cls = Qwen3Model
