# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gpt2.py @ v0.25.0
"""GPT-2: learned positions, matrices stored the other way round."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, headless_starts


class GPT2Attention(LlamaAttention):
    """Multi-head attention without rotation, biases on both sides."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Both."""
        return True, True

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None: positions are added to the embedding."""
        return None


class GPT2Block(LayerNormDecoderLayer):
    """Llama's order."""

    attention_cls = GPT2Attention


class GPT2Model(LlamaModel):
    """Embeddings of tokens and places, layers, final norm."""

    layer_cls = GPT2Block

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, ops=ops, prefix=prefix)
        self.embed_positions = VocabParallelEmbedding(
            self.config.max_position_embeddings, self.config.hidden_size, ops
        )

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """The sum of both."""
        return self.embed_tokens(input_ids) + self.embed_positions(positions)


class GPT2LMHeadModel(LlamaForCausalLM):
    """GPT-2 with its (tied) output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        skip=(".attn.bias", ".attn.masked_bias"),
        starts=headless_starts("transformer.", "wte.", "wpe.", "ln_f.", "h."),
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.wpe.": "model.embed_positions.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".ln_1.": ".input_layernorm.",
            ".ln_2.": ".post_attention_layernorm.",
            ".attn.c_attn.": ".self_attn.qkv_proj.",
            ".attn.c_proj.": ".self_attn.o_proj.",
            ".mlp.c_fc.": ".mlp.up_proj.",
            ".mlp.c_proj.": ".mlp.down_proj.",
        },
    )
    model_cls = GPT2Model

    def adapt(self, name: str, weight: Any) -> Any:
        """Matrices are stored [in, out]."""
        turned = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        return weight.T if turned and weight.dim() == 2 else weight
