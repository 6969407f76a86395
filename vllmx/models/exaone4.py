# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/exaone4.py @ v0.25.0
"""EXAONE 4: norms after attention and MLP; among layers with windows the full ones don't rotate."""

from __future__ import annotations

from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.dense import PostNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention


class Exaone4Attention(Qwen3Attention):
    """Normed queries and keys."""

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None in the full layers of a model that has windows."""
        if "sliding_attention" in config.layer_types and (
            config.layer_types[layer] == "full_attention"
        ):
            return None
        return super().rope_of(config, layer, max_model_len, ops)


class Exaone4DecoderLayer(PostNormDecoderLayer):
    """Attention and MLP, each normed after."""

    attention_cls = Exaone4Attention


class Exaone4Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Exaone4DecoderLayer


class Exaone4ForCausalLM(LlamaForCausalLM):
    """EXAONE 4 with its output head."""

    model_cls = Exaone4Model
