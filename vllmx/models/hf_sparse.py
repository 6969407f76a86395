# SPDX-License-Identifier: Apache-2.0
"""The same as hf_dense.py for families with experts and attention in every layer."""

from __future__ import annotations

from typing import Any

from vllmx.models.hf_dense import LLAMA_LIKE

QWEN_MOE = LLAMA_LIKE | {
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": 28,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
SPARSE_DEFAULTS: dict[str, dict[str, Any]] = {
    "afmoe": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "max_position_embeddings": 16384,
        "sliding_window": 1024,
        "sliding_window_pattern": 4,
        "moe_intermediate_size": 1408,
        "num_dense_layers": 1,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "route_norm": True,
        "score_func": "sigmoid",
        "n_group": 1,
        "topk_group": 1,
        "mup_enabled": False,
    },
    "deepseek": LLAMA_LIKE
    | {
        "norm_topk_prob": False,
        "n_shared_experts": None,
        "n_routed_experts": None,
        "moe_layer_freq": 1,
        "first_k_dense_replace": 0,
        "scoring_func": "softmax",
    },
    "ernie4_5_moe": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_bias": False,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 1,
        "rope_theta": 500000.0,
    },
    "exaone_moe": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 1024,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
    },
    "flex_olmo": LLAMA_LIKE
    | {
        "max_position_embeddings": 4096,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "norm_topk_prob": False,
        "rope_theta": 500000.0,
    },
    "granitemoeshared": LLAMA_LIKE
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 0,
    },
    "hunyuan_v1_moe": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "num_experts": 1, "moe_topk": 1},
    "mellum": LLAMA_LIKE
    | {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "sliding_window": 1024,
        "moe_intermediate_size": 896,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "minimax_m2": LLAMA_LIKE
    | {
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 196608,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5000000.0,
    },
    "phimoe": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "router_jitter_noise": 0.01,
        "lm_head_bias": False,
        "rope_theta": 1000000.0,
    },
    "glm4_moe": LLAMA_LIKE
    | {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "num_key_value_heads": 8,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "use_qk_norm": False,
    },
    "gpt_oss": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "granitemoe": LLAMA_LIKE
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "llama4_text": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "rope_theta": 500000.0,
    },
    "mixtral": LLAMA_LIKE
    | {
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "olmoe": LLAMA_LIKE
    | {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "clip_qkv": None,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    "qwen2_moe": QWEN_MOE
    | {
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "qkv_bias": True,
    },
    "qwen3_moe": QWEN_MOE
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "shared_expert_intermediate_size": 0,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
}
SPARSE_ALIASES: dict[str, dict[str, str]] = {
    "afmoe": {"sliding_window_pattern": "global_attn_every_n_layers"},
    "ernie4_5_moe": {
        "mlp_bias": "use_bias",
        "moe_num_experts": "num_experts",
        "moe_k": "num_experts_per_tok",
    },
    "flex_olmo": {"num_experts": "num_local_experts"},
    "hunyuan_v1_moe": {"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"},
    "mellum": {"num_experts": "num_local_experts"},
    "minimax_m2": {"num_local_experts": "num_experts"},
    "phimoe": {"layer_norm_eps": "rms_norm_eps"},
    "glm4_moe": {
        "n_routed_experts": "num_local_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    "gpt_oss": {"num_local_experts": "num_experts"},
    "mixtral": {"num_local_experts": "num_experts"},
    "olmoe": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
"""transformers writes one or the other."""
