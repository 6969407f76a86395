# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gpt_neox.py @ v0.25.0
"""GPT-NeoX and Pythia: attention and MLP side by side, each of a norm of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper, by_head


class GPTNeoXLayer(LayerNormDecoderLayer):
    """Both parts of the stream as it came in, or one after the other."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.use_parallel_residual = config.use_parallel_residual

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        attended = hidden_states + self.self_attn(positions, self.input_layernorm(hidden_states))
        given = hidden_states if self.use_parallel_residual else attended
        return attended + self.mlp(self.post_attention_layernorm(given)), None


class GPTNeoXModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = GPTNeoXLayer


class GPTNeoXForCausalLM(LlamaForCausalLM):
    """GPT-NeoX with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        skip=(".attention.bias", ".attention.masked_bias"),
        renamed={
            "gpt_neox.embed_in.": "model.embed_tokens.",
            "gpt_neox.final_layer_norm.": "model.norm.",
            "gpt_neox.": "model.",
            "embed_out.": "lm_head.",
            ".attention.query_key_value.": ".self_attn.qkv_proj.",
            ".attention.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
    )
    model_cls = GPTNeoXModel

    def adapt(self, name: str, weight: Any) -> Any:
        """Rows come head by head: query, key and value of each."""
        if ".query_key_value." not in name:
            return weight
        return by_head(weight, 1, self.config.head_dim)
