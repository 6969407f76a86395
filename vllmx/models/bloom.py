# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/bloom.py @ v0.25.0
"""BLOOM: slopes of the scores instead of positions, and a norm behind the embedding.

Its MLP has the exact gelu, as upstream's has; transformers has a tanh, as its training had.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.alibi import alibi_slopes
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.gpt2 import GPT2Attention
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, by_head, headless_starts


class BloomAttention(GPT2Attention):
    """Multi-head attention without rotation; the further a key, the lower its score."""

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """All before a token, by their distance."""
        return {"alibi_slopes": alibi_slopes(config.num_attention_heads)}


class BloomBlock(LayerNormDecoderLayer):
    """Llama's order; a residual that is normed is refused."""

    attention_cls = BloomAttention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        if config.read("apply_residual_connection_post_layernorm", bool, False):
            raise CheckpointError(
                f"{config.origin}: apply_residual_connection_post_layernorm=True is not supported."
            )
        super().__init__(config, **shared)


class BloomModel(LlamaModel):
    """Normed embedding, layers, final norm."""

    layer_cls = BloomBlock

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, ops=ops, prefix=prefix)
        self.embed_norm = self.layer_cls.make_norm(self.config, ops)

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows of the table, normed."""
        return self.embed_norm(self.embed_tokens(input_ids))


class BloomForCausalLM(LlamaForCausalLM):
    """BLOOM with its (tied) output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        starts=headless_starts(
            "transformer.", "word_embeddings.", "word_embeddings_layernorm.", "ln_f.", "h."
        ),
        renamed={
            "transformer.word_embeddings_layernorm.": "model.embed_norm.",
            "transformer.word_embeddings.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".self_attention.query_key_value.": ".self_attn.qkv_proj.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
    )
    model_cls = BloomModel

    def adapt(self, name: str, weight: Any) -> Any:
        """Rows come head by head: query, key and value of each."""
        if ".query_key_value." not in name:
            return weight
        return by_head(weight, 1, self.config.head_dim)
