# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/persimmon.py @ v0.25.0
"""Persimmon: norms by mean and variance everywhere, queries and keys too; squared relu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.layers.layernorm import LayerNorm
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.phi import PhiAttention
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, by_head


class PersimmonAttention(PhiAttention):
    """Biases on both sides; each head normed, then half of it rotated."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.head_dim = config.head_dim
        self.norms = config.qk_layernorm
        if self.norms:
            size = (config.head_dim, config.layer_norm_eps, shared["ops"])
            self.q_layernorm, self.k_layernorm = LayerNorm(*size), LayerNorm(*size)

    def refuse(self, config: HFConfig) -> None:
        """Nothing: it has the norms."""

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, then rotate."""
        if not self.norms:
            return super().prepare(positions, qk)
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        q = self.q_layernorm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_layernorm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        assert self.rotary_emb is not None
        q, k = self.rotary_emb(positions, q, k)
        return q, k


class PersimmonDecoderLayer(LayerNormDecoderLayer):
    """Llama's order."""

    attention_cls = PersimmonAttention


class PersimmonModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = PersimmonDecoderLayer


class PersimmonForCausalLM(LlamaForCausalLM):
    """Persimmon with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={
            ".query_key_value.": ".qkv_proj.",
            ".self_attn.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
            ".final_layernorm.": ".norm.",
        },
    )
    model_cls = PersimmonModel

    def adapt(self, name: str, weight: Any) -> Any:
        """Rows come head by head: query, key and value of each."""
        if ".query_key_value." not in name:
            return weight
        return by_head(weight, 1, self.config.head_dim)
