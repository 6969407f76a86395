# SPDX-License-Identifier: Apache-2.0
"""Dense families' own names of what Llama's config has too, and the values they may leave out.

As transformers has them. Imports nothing: vllmx/models/hf_config.py reads it.
"""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rope_theta": 10000.0,
}
LLAMA_LIKE = COMMON | {"hidden_act": "silu", "rms_norm_eps": 1e-6, "mlp_bias": False}
GEMMA = COMMON | {
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "head_dim": 256,
}
COHERE = COMMON | {
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}
GLM = LLAMA_LIKE | {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
}
FALCON = COMMON | {
    "layer_norm_eps": 1e-5,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "alibi": False,
    "multi_query": True,
    "parallel_attn": True,
    "new_decoder_architecture": False,
    "num_ln_in_parallel_attn": None,
    "bias": False,
}
STABLELM = COMMON | {
    "hidden_act": "silu",
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "partial_rotary_factor": 0.25,
    "use_qkv_bias": False,
    "qk_layernorm": False,
    "use_parallel_residual": False,
}
GPT = COMMON | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DENSE_DEFAULTS: dict[str, dict[str, Any]] = {
    "apertus": LLAMA_LIKE
    | {
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 65536,
        "rope_theta": 12000000.0,
        "rope_parameters": LLAMA3_ROPE | {"rope_theta": 12000000.0, "factor": 8.0},
    },
    "arcee": LLAMA_LIKE
    | {"hidden_act": "relu2", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "bloom": GPT | {"hidden_act": "gelu", "tie_word_embeddings": True},
    "cohere": COHERE | {"use_qk_norm": False, "rope_theta": 500000.0},
    "cohere2": COHERE | {"sliding_window": 4096, "sliding_window_pattern": 4},
    "cwm": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "sliding_window": 8192,
        "rope_theta": 1000000.0,
        "rope_parameters": LLAMA3_ROPE | {"rope_theta": 1000000.0, "factor": 16.0},
    },
    "ernie4_5": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "use_bias": False,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
        "rope_theta": 500000.0,
    },
    "exaone4": LLAMA_LIKE
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "exaone": LLAMA_LIKE
    | {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 500000.0},
    "falcon": FALCON,
    "gemma": GEMMA,
    "gemma2": GEMMA
    | {
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "glm": GLM | {"attention_bias": True},
    "glm4": GLM | {"attention_bias": True},
    "gpt2": GPT | {"tie_word_embeddings": True, "max_position_embeddings": 1024},
    "gpt_bigcode": GPT
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "max_position_embeddings": 1024,
        "multi_query": True,
    },
    "gpt_neox": GPT
    | {
        "hidden_act": "gelu",
        "partial_rotary_factor": 0.25,
        "use_parallel_residual": True,
        "attention_bias": True,
    },
    "gptj": GPT | {"rotary_dim": 64},
    "granite": LLAMA_LIKE
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "attention_multiplier": 1.0,
    },
    "hunyuan_v1_dense": LLAMA_LIKE | {"rms_norm_eps": 1e-5},
    "hyperclovax": LLAMA_LIKE
    | {
        "embedding_multiplier": 1.0,
        "logits_scaling": 1.0,
        "residual_multiplier": 1.0,
        "use_post_norm": True,
    },
    "internlm3": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "head_dim": 128,
    },
    "iquestcoder": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "jais2": COMMON
    | {
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "attention_bias": True,
    },
    "mpt": COMMON
    | {
        "hidden_act": "gelu",
        "tie_word_embeddings": True,
        "mlp_bias": False,
        "clip_qkv": None,
        "alibi_bias_max": 8,
    },
    "nemotron": COMMON
    | {
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 4096,
        "mlp_bias": False,
    },
    "olmo": COMMON | {"hidden_act": "silu", "clip_qkv": None},
    "olmo2": LLAMA_LIKE | {"rms_norm_eps": 1e-5},
    "olmo3": LLAMA_LIKE | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
    "opt": COMMON
    | {
        "hidden_act": "relu",
        "tie_word_embeddings": True,
        "do_layer_norm_before": True,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "_remove_final_layer_norm": False,
    },
    "persimmon": COMMON
    | {
        "hidden_act": "relu2",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
        "max_position_embeddings": 16384,
    },
    "phi": COMMON
    | {
        "hidden_act": "gelu_new",
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": False,
    },
    "phi3": LLAMA_LIKE
    | {
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "sliding_window": None,
    },
    "seed_oss": LLAMA_LIKE
    | {"max_position_embeddings": 524288, "attention_bias": True, "attention_out_bias": False},
    "smollm3": LLAMA_LIKE
    | {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layer_interval": 4,
        "rope_theta": 2000000.0,
    },
    "stablelm": STABLELM,
    "starcoder2": COMMON
    | {
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 2,
        "sliding_window": None,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
}
"""What transformers assumes, by model_type, for keys that a config.json may leave out."""

MINISTRAL3_DEFAULTS = LLAMA_LIKE | {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262144,
    "sliding_window": None,
    "rope_theta": 1000000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1000000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale_all_dim": 1.0,
        "mscale": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
_GPT_NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "hidden_act": "activation_function",
    "layer_norm_eps": "layer_norm_epsilon",
}
ALIASES: dict[str, dict[str, str]] = {
    "bloom": {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "layer_norm_eps": "layer_norm_epsilon",
    },
    "exaone": {
        "num_hidden_layers": "num_layers",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
    },
    "falcon": {
        "intermediate_size": "ffn_hidden_size",
        "num_key_value_heads": "num_kv_heads",
        "layer_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        "mlp_bias": "bias",
    },
    "gpt2": _GPT_NAMES,
    "gpt_bigcode": _GPT_NAMES,
    "gpt_neox": {"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
    "gptj": _GPT_NAMES,
    "internlm3": {"attention_bias": "qkv_bias", "mlp_bias": "bias"},
    "mpt": {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "num_key_value_heads": "attn_config.kv_n_heads",
        "clip_qkv": "attn_config.clip_qkv",
        "alibi_bias_max": "attn_config.alibi_bias_max",
    },
    "nemotron": {"layer_norm_eps": "norm_eps"},
    "opt": {"hidden_act": "activation_function", "intermediate_size": "ffn_dim"},
    "starcoder2": {
        "layer_norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
    },
}
"""By model_type: our key -> the family's own, taken where ours is not there."""

SLIDING: dict[str, int] = {
    "afmoe": 4,
    "cohere2": 4,
    "exaone4": 4,
    "exaone_moe": 4,
    "gemma2": 2,
    "gpt_oss": 2,
    "olmo3": 4,
}
"""Families whose every n-th layer is full and the others have a window, unless told otherwise."""
ALL_SLIDING = ("mistral", "ministral3", "mixtral", "phi3", "phimoe", "qwen3_moe", "starcoder2")
"""Families of which every layer has the window, if there is one."""
