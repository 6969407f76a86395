# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gpt_j.py @ v0.25.0
"""GPT-J: attention and MLP side by side, neighbours of a head rotated in pairs."""

from __future__ import annotations

from typing import Any

from vllmx.models.dense import ParallelDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class GPTJAttention(LlamaAttention):
    """Multi-head attention without biases, rotated in pairs."""

    is_neox_style = False

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Over the first rotary_dim elements of a head."""
        return {**config.rope_parameters, "rope_dim": config.rotary_dim}


class GPTJBlock(ParallelDecoderLayer):
    """Attention and MLP of one norm."""

    attention_cls = GPTJAttention


class GPTJModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = GPTJBlock


class GPTJForCausalLM(LlamaForCausalLM):
    """GPT-J with its output head, which has a bias."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        skip=(".attn.bias", ".attn.masked_bias"),
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".ln_1.": ".input_layernorm.",
            ".attn.out_proj.": ".self_attn.o_proj.",
            ".attn.": ".self_attn.",
            ".fc_in.": ".up_proj.",
            ".fc_out.": ".down_proj.",
        },
    )
    model_cls = GPTJModel
    lm_head_bias = True
