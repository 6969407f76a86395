# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/falcon.py @ v0.25.0
"""Falcon: one, few or all key heads, attention and MLP side by side; Falcon-RW has them one after
the other, and slopes of the scores instead of positions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.alibi import alibi_slopes
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.dense import LayerNormDecoderLayer, PlainMLP
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, by_head


class FalconAttention(LlamaAttention):
    """Llama's; with alibi, the further a key, the lower its score, instead of the rotation."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        if not (config.alibi or config.read("rotary", bool, True)):
            raise CheckpointError(f"{config.origin}: rotary=false is not supported.")
        super().__init__(config, **shared)

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None with alibi: there are no positions."""
        return None if config.alibi else super().rope_of(config, layer, max_model_len, ops)

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """All before a token; with alibi by their distance, which counts before scores are scaled
        and not, as in other families, after."""
        if not config.alibi:
            return super().reach_of(config, layer)
        scale = self.scale_of(config)
        return {"alibi_slopes": [scale * s for s in alibi_slopes(config.num_attention_heads)]}

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """`bias`, on both sides."""
        return config.bias, config.bias


class FalconMLP(PlainMLP):
    """No gate; biases where the config asks for them."""

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
