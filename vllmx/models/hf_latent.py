# SPDX-License-Identifier: Apache-2.0
"""The same as hf_dense.py for families whose keys and values come of latents."""

from __future__ import annotations

from typing import Any

from vllmx.models.hf_dense import LLAMA_LIKE

LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
LATENT_DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LLAMA_LIKE
    | {
        **LATENT,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "n_group": None,
        "topk_group": None,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": LLAMA_LIKE
    | {
        **LATENT,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 2048,
    },
    "glm4_moe_lite": LLAMA_LIKE
    | {
        **LATENT,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "moe_intermediate_size": 1536,
    },
    "minicpm3": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    },
}
LATENT_DEFAULTS["kimi_k2"] = LATENT_DEFAULTS["deepseek_v3"]
LATENT_DEFAULTS["axk1"] = LATENT_DEFAULTS["deepseek_v3"] | {
    "max_position_embeddings": 32768,
    "n_routed_experts": 192,
    "first_k_dense_replace": 1,
}
LATENT_DEFAULTS["AXK1"] = LATENT_DEFAULTS["axk1"] | {"max_position_embeddings": 131072}
LATENT_ALIASES: dict[str, dict[str, str]] = {
    name: {"n_routed_experts": "num_local_experts", "num_nextn_predict_layers": "num_mtp_layers"}
    for name in ("deepseek_v3", "glm4_moe_lite")
}
"""transformers writes one or the other."""
