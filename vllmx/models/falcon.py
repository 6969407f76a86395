# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/falcon.py @ v0.25.0
"""Falcon: one or few key heads, attention and MLP side by side."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.models.dense import LayerNormDecoderLayer, PlainMLP
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, by_head


class FalconAttention(LlamaAttention):
    """Llama's; positions by a slope of the scores (alibi) are refused."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        if config.alibi:
            raise CheckpointError(f"{config.origin}: alibi=true is not supported.")
        if not config.read("rotary", bool, True):
            raise CheckpointError(f"{config.origin}: rotary=false is not supported.")
        super().__init__(config, **shared)

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """`bias`, on both sides."""
        return config.bias, config.bias


class FalconMLP(PlainMLP):
    """No gate."""

    has_bias = False


class FalconDecoderLayer(LayerNormDecoderLayer):
    """Side by side, of one norm or two; or one after the other."""

    attention_cls = FalconAttention
    mlp_cls = FalconMLP

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        norms = config.num_ln_in_parallel_attn or (2 if config.new_decoder_architecture else 1)
        if norms not in (1, 2):
            raise CheckpointError(
                f"{config.origin}: num_ln_in_parallel_attn is {norms}, not 1 or 2."
            )
        self.parallel_attn = config.parallel_attn
        self.one_norm = self.parallel_attn and norms == 1
        if self.one_norm:
            del self.post_attention_layernorm

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        normed = self.input_layernorm(hidden_states)
        attended = hidden_states + self.self_attn(positions, normed)
        if not self.one_norm:
            given = hidden_states if self.parallel_attn else attended
            normed = self.post_attention_layernorm(given)
        return attended + self.mlp(normed), None


class FalconModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = FalconDecoderLayer


class FalconForCausalLM(LlamaForCausalLM):
    """Falcon with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={
            "transformer.word_embeddings.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".ln_attn.": ".input_layernorm.",
            ".ln_mlp.": ".post_attention_layernorm.",
            ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
    )
    model_cls = FalconModel

    def adapt(self, name: str, weight: Any) -> Any:
        """Rows come key head by key head: its queries, then key and value."""
        if ".query_key_value." not in name:
            return weight
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return by_head(weight, group, self.config.head_dim)


class RWForCausalLM(FalconForCausalLM):
    """The name that the first checkpoints have."""
