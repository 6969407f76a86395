# SPDX-License-Identifier: Apache-2.0
"""The same as hf_dense.py for families that transformers has no class for: what their own code
assumes, which lies beside their checkpoints."""

from __future__ import annotations

from typing import Any

from vllmx.models.hf_dense import FALCON, LLAMA_LIKE, STABLELM

BAILING = LLAMA_LIKE | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "use_bias": False,
    "use_qkv_bias": False,
    "use_qk_norm": False,
    "use_rmsnorm": True,
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "num_shared_experts": 0,
    "routed_scaling_factor": 1.0,
    "moe_router_enable_expert_bias": False,
}
REFINED_WEB = FALCON | {"parallel_attn": False, "num_key_value_heads": 1}
REMOTE_DEFAULTS: dict[str, dict[str, Any]] = {
    "PanguEmbedded": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "max_position_embeddings": 32768},
    "RefinedWeb": REFINED_WEB,
    "RefinedWebModel": REFINED_WEB,
    "TeleFLM": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "use_mup": False},
    "bailing_moe": BAILING,
    "bailing_moe_v2": BAILING
    | {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
    },
    "chatglm": LLAMA_LIKE | {"rms_norm_eps": 1e-5},
    "internlm2": LLAMA_LIKE,
    "mimo": LLAMA_LIKE | {"max_position_embeddings": 32768},
    "minicpm": LLAMA_LIKE | {"scale_emb": 1.0, "scale_depth": 1.0, "dim_model_base": 1},
    "nemotron-nas": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "max_position_embeddings": 131072},
    "orion": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "param2moe": BAILING
    | {
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "first_k_dense_replace": 1,
        "num_shared_experts": 1,
    },
    "plamo3": LLAMA_LIKE | {"rope_theta": 1000000.0, "rope_local_theta": 10000.0},
    "stablelm_epoch": STABLELM,
    "telechat": LLAMA_LIKE | {"rms_norm_eps": 1e-5},
}
"""By model_type, for keys that a config.json may leave out."""

_REFINED_WEB_NAMES = {
    "hidden_size": "n_embed",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_key_value_heads": "n_head_kv",
    "layer_norm_eps": "layer_norm_epsilon",
    "mlp_bias": "bias",
}
REMOTE_ALIASES: dict[str, dict[str, str]] = {
    "PanguEmbedded": {"attention_bias": "bias"},
    "RefinedWeb": _REFINED_WEB_NAMES,
    "RefinedWebModel": _REFINED_WEB_NAMES,
    "bailing_moe": {"mlp_bias": "use_bias"},
    "bailing_moe_v2": {"mlp_bias": "use_bias"},
    "chatglm": {
        "vocab_size": "padded_vocab_size",
        "num_hidden_layers": "num_layers",
        "intermediate_size": "ffn_hidden_size",
        "head_dim": "kv_channels",
        "rms_norm_eps": "layernorm_epsilon",
        "max_position_embeddings": "seq_length",
        "mlp_bias": "add_bias_linear",
        "num_key_value_heads": "multi_query_group_num",
    },
    "internlm2": {"attention_bias": "bias"},
    "stablelm_epoch": {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"},
    "telechat": {
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
    },
}
"""By model_type: our key -> the family's own, taken where ours is not there."""
