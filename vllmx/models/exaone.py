# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/exaone.py @ v0.25.0
"""EXAONE 3: Llama under GPT-2's names."""

from __future__ import annotations

from vllmx.models.llama import LlamaForCausalLM
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


class ExaoneForCausalLM(LlamaForCausalLM):
    """EXAONE 3 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".ln_1.": ".input_layernorm.",
            ".ln_2.": ".post_attention_layernorm.",
            ".attn.attention.out_proj.": ".self_attn.o_proj.",
            ".attn.attention.": ".self_attn.",
            ".mlp.c_fc_0.": ".mlp.gate_proj.",
            ".mlp.c_fc_1.": ".mlp.up_proj.",
            ".mlp.c_proj.": ".mlp.down_proj.",
        },
    )
