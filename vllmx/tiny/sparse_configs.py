# SPDX-License-Identifier: Apache-2.0
"""More tiny models with experts, as dense_configs.py has the dense ones: their configs."""

from __future__ import annotations

from typing import Any

from vllmx.tiny.dense_configs import NO_HEAD_DIM, PARTIAL, ROPE, SILU, WINDOWS, family

EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2}
NARROW = {"moe_intermediate_size": 64}
ONE_DENSE = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}

MORE_SPARSE: dict[str, dict[str, Any]] = {
    "tiny-afmoe": family(
        "AfmoeForCausalLM",
        "afmoe",
        SILU,
        WINDOWS,
        NARROW,
        {
            "head_dim": 64,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "route_scale": 1.5,
            "route_norm": True,
            "score_func": "sigmoid",
            "n_group": 1,
            "topk_group": 1,
            "mup_enabled": True,
        },
    ),
    "tiny-ernie4_5_moe": family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        SILU,
        NARROW,
        {
            "head_dim": 80,
            "use_bias": False,
            "tie_word_embeddings": True,
            "moe_k": 3,
            "moe_num_experts": 8,
            "moe_num_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 1,
        },
    ),
    "tiny-exaone_moe": family(
        "ExaoneMoEForCausalLM",
        "exaone_moe",
        SILU,
        WINDOWS,
        NARROW,
        ONE_DENSE,
        {
            "head_dim": 96,
            "is_moe_layer": [False, True, True, True],
            "first_k_dense_replace": 1,
            "sliding_window_pattern": 4,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "norm_topk_prob": True,
        },
    ),
    "tiny-flex_olmo": family(
        "FlexOlmoForCausalLM",
        "flex_olmo",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "intermediate_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
            "pad_token_id": 0,
        },
    ),
    "tiny-granitemoeshared": family(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        SILU,
        EIGHT,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "tie_word_embeddings": True,
            "intermediate_size": 64,
            "shared_intermediate_size": 96,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "tiny-hunyuan_v1_moe": family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        SILU,
        NARROW,
        {
            "head_dim": 112,
            "intermediate_size": 64,
            "use_qk_norm": True,
            "num_experts": 8,
            "moe_topk": 3,
            "use_mixed_mlp_moe": True,
            "num_shared_expert": 1,
            "use_cla": False,
        },
    ),
    "tiny-mellum": family(
        "MellumForCausalLM",
        "mellum",
        SILU,
        WINDOWS,
        NARROW,
        ONE_DENSE,
        {
            "head_dim": 80,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "use_sliding_window": True,  # upstream forgets the window without it
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
            },
        },
    ),
    "tiny-minimax_m2": family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        SILU,
        PARTIAL,
        {
            "head_dim": 128,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "rotary_dim": 64,
            "intermediate_size": 64,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "tiny-phimoe": family(
        "PhiMoEForCausalLM",
        "phimoe",
        SILU,
        EIGHT,
        {
            "head_dim": 64,
            "hidden_size": 256,
            "intermediate_size": 64,
            "attention_bias": True,
            "lm_head_bias": False,
            "sliding_window": None,
            "router_jitter_noise": 0.01,
        },
    ),
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
