# SPDX-License-Identifier: Apache-2.0
"""Tiny models whose keys and values come of latents (MLA): their configs, and their tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vllmx.tiny.dense_configs import ALL_HEADS, NO_HEAD_DIM, NULL, ROPE, SILU, family
from vllmx.tiny.dense_tensors import GATED, NORMS, Layout, named
from vllmx.tiny.sparse_layouts import EACH, GATE, SHARED, behind_first

DEEPSEEK = {
    **ALL_HEADS,
    **NO_HEAD_DIM,
    "rms_norm_eps": 1e-6,  # that of latents in transformers, whatever the config says
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
"""What V3 and its relatives have in common."""
LATENT_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-axk1": family(
        "AXK1ForCausalLM",
        "axk1",
        SILU,
        DEEPSEEK,
        {
            "qk_nope_head_dim": 80,
            "qk_rope_head_dim": 32,
            "v_head_dim": 80,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "tiny-deepseek_v2": family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        SILU,
        DEEPSEEK,
        {
            "q_lora_rank": NULL,
            "qk_nope_head_dim": 48,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
            "topk_method": "group_limited_greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "tiny-deepseek_v3": family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        SILU,
        DEEPSEEK,
        {
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 32,
            "first_k_dense_replace": 1,
        },
    ),
    "tiny-glm4_moe_lite": family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        SILU,
        DEEPSEEK,
        {
            "qk_nope_head_dim": 96,
            "qk_rope_head_dim": 32,
            "v_head_dim": 128,
            "n_group": 1,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        },
    ),
    "tiny-minicpm3": family(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        SILU,
        ALL_HEADS,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "tie_word_embeddings": True,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 128,
        },
    ),
}
"""As FAMILIES of vllmx/tiny/configs.py."""

LATENT = (
    named("B+R H", "self_attn.kv_a_proj_with_mqa")
    | named("B", "self_attn.kv_a_layernorm")
    | named("NY B", "self_attn.kv_b_proj")
    | named("H NW", "self_attn.o_proj")
)
LATENT_QUERIES = (
    named("A H", "self_attn.q_a_proj")
    | named("A", "self_attn.q_a_layernorm")
    | named("NX A", "self_attn.q_b_proj")
)
V3 = Layout(
    LATENT | LATENT_QUERIES | NORMS,
    sparse=GATE | {"mlp.gate.e_score_correction_bias": "E"} | EACH | SHARED,
    dense=GATED,
    is_sparse=behind_first,
)

LATENT_LAYOUTS: dict[str, Layout] = {
    "axk1": replace(V3, layer=V3.layer | named("H", "post_mlp_layernorm")),
    "deepseek_v2": Layout(
        LATENT | named("NX H", "self_attn.q_proj") | NORMS,
        sparse=GATE | EACH | SHARED,
        dense=GATED,
        is_sparse=behind_first,
    ),
    "deepseek_v3": V3,
    "glm4_moe_lite": V3,
    "minicpm3": Layout(LATENT | LATENT_QUERIES | GATED | NORMS),
}
"""By model_type."""
