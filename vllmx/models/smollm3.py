# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/transformers/causal.py @ v0.25.0
"""SmolLM3: Llama of which every fourth layer does not rotate. Upstream runs transformers' own."""

from __future__ import annotations

from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class SmolLM3Attention(LlamaAttention):
    """Llama's, rotated where no_rope_layers does not say 0."""

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None where no_rope_layers says 0."""
        if not config.no_rope_layers[layer]:
            return None
        return super().rope_of(config, layer, max_model_len, ops)


class SmolLM3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around SmolLM3's attention."""

    attention_cls = SmolLM3Attention


class SmolLM3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = SmolLM3DecoderLayer


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """SmolLM3 with its output head."""

    model_cls = SmolLM3Model
