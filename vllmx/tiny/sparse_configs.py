# SPDX-License-Identifier: Apache-2.0
"""More tiny models with experts, as dense_configs.py has the dense ones: their configs."""

from __future__ import annotations

from typing import Any

from vllmx.tiny.dense_configs import ROPE, SILU, family

EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}

MORE_SPARSE: dict[str, dict[str, Any]] = {
    "tiny-gpt_oss": family(
        "GptOssForCausalLM",
        "gpt_oss",
        SILU,
        EIGHT,
        {
            "head_dim": 64,
            "intermediate_size": 64,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "tiny-llama4": family(
        "Llama4ForCausalLM",
        "llama4_text",
        SILU,
        {
            "head_dim": 80,
            "intermediate_size": 64,
            "intermediate_size_mlp": 96,
            "num_local_experts": 8,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 0, 1, 1],
            "floor_scale": 48,
            "attn_scale": 0.2,
        },
    ),
}
"""As FAMILIES of vllmx/tiny/configs.py."""
GENERATION_CONFIGS: dict[str, dict[str, Any]] = {"tiny-llama4": {"attn_temperature_tuning": True}}
"""generation_config.json of those that have one: upstream reads there what transformers reads in
config.json."""
