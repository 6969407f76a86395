# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/hunyuan_v1.py @ v0.25.0
"""HunYuan, dense: Llama with norms of queries and keys after the rotation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.layers.layernorm import RMSNorm
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class HunYuanAttention(LlamaAttention):
    """Rotated, then normed head by head unless use_qk_norm is false."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.head_dim = config.head_dim
        self.use_qk_norm = config.read("use_qk_norm", bool, True)
        if self.use_qk_norm:
            self.query_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps, shared["ops"])
            self.key_layernorm = RMSNorm(config.head_dim, config.rms_norm_eps, shared["ops"])

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate, then norm."""
        q, k = super().prepare(positions, qk)
        if not self.use_qk_norm:
            return q, k
        q = self.query_layernorm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.key_layernorm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        return q, k


class HunYuanDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around HunYuan's attention."""

    attention_cls = HunYuanAttention


class HunYuanModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = HunYuanDecoderLayer


class HunYuanDenseV1ForCausalLM(LlamaForCausalLM):
    """HunYuan with its output head."""

    model_cls = HunYuanModel
