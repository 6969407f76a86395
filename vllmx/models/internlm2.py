# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/internlm2.py @ v0.25.0
"""InternLM2: Llama whose queries, keys and values come stacked key head by key head."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.models.llama import LlamaForCausalLM
from vllmx.models.utils import WeightsMapper, by_head


class InternLM2ForCausalLM(LlamaForCausalLM):
    """InternLM2 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked={".w1.": (".gate_up_proj.", "0"), ".w3.": (".gate_up_proj.", "1")},
        renamed={
            "model.tok_embeddings.": "model.embed_tokens.",
            "output.": "lm_head.",
            ".attention_norm.": ".input_layernorm.",
            ".ffn_norm.": ".post_attention_layernorm.",
            ".attention.wqkv.": ".self_attn.qkv_proj.",
            ".attention.wo.": ".self_attn.o_proj.",
            ".feed_forward.w2.": ".mlp.down_proj.",
            ".feed_forward.": ".mlp.",
        },
    )

    def adapt(self, name: str, weight: Any) -> Any:
        """Rows come key head by key head: its queries, then key and value."""
        if ".wqkv." not in name or not isinstance(weight, Tensor):
            return weight
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return by_head(weight, group, self.config.head_dim)
