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
    "granitemoe": LLAMA_LIKE
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
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
    "glm4_moe": {
        "n_routed_experts": "num_local_experts",
        "num_nextn_predict_layers": "num_mtp_layers",
    },
    "mixtral": {"num_local_experts": "num_experts"},
    "olmoe": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_experts": "num_local_experts"},
}
"""transformers writes one or the other."""
