# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/olmo2.py @ v0.25.0
"""OLMo 2 and 3: norms after attention and MLP, and of all queries and keys together."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.layers.layernorm import RMSNorm
from vllmx.models.dense import PostNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel


class Olmo2Attention(LlamaAttention):
    """Queries are normed over all heads at once, and so are keys."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.q_norm = RMSNorm(self.q_size, config.rms_norm_eps, shared["ops"])
        self.k_norm = RMSNorm(self.kv_size, config.rms_norm_eps, shared["ops"])

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Scaled in full layers only (OLMo 3)."""
        rope, kind = config.rope_parameters, config.layer_types[layer]
        if kind in rope:
            return super().rope_parameters_of(config, layer)
        if kind == "sliding_attention":
            return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
        return rope

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Norm, then rotate."""
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        assert self.rotary_emb is not None
        q, k = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        return q, k


class Olmo2DecoderLayer(PostNormDecoderLayer):
    """Attention and MLP, each normed after."""

    attention_cls = Olmo2Attention


class Olmo2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Olmo2DecoderLayer


class Olmo2ForCausalLM(LlamaForCausalLM):
    """OLMo 2 with its output head."""

    model_cls = Olmo2Model


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 3: three of four layers have a window."""
