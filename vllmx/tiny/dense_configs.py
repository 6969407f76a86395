# SPDX-License-Identifier: Apache-2.0
"""Tiny models of dense families: what config.json of each says beside the common sizes.

A value of None takes a key of the common sizes away, where the family has another name for it; NULL
is a key that says null.
"""

from __future__ import annotations

from typing import Any

NULL: Any = ...
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SILU = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": ROPE}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": ROPE,
}
ALL_HEADS = {"num_key_value_heads": 4}


def family(architecture: str, model_type: str, *parts: dict[str, Any]) -> dict[str, Any]:
    """What config.json of a family says; later parts overrule earlier ones."""
    said: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for part in parts:
        said |= part
    return said


GPT = {  # other names of the common sizes
    "hidden_size": None,
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 1024,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
OTHER_NAMES = {
    "num_hidden_layers": None,
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "head_dim": None,
    "intermediate_size": None,
    "max_position_embeddings": None,
    "rms_norm_eps": None,
}
"""The common sizes but the hidden one, where a family calls them otherwise or has none."""
LAYER_NORM = {"rms_norm_eps": None, "layer_norm_eps": 1e-5}
PARTIAL = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
WINDOWS = {
    "sliding_window": 24,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
}
NO_HEAD_DIM = {"head_dim": None}
BOTH_ROPES = {
    "rope_parameters": {**ROPE, "sliding_attention": ROPE, "full_attention": ROPE},
}
"""What transformers reads for each kind of layer, and upstream for all."""

DENSE_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-apertus": family("ApertusForCausalLM", "apertus", SILU, {"hidden_act": "xielu"}),
    "tiny-arcee": family("ArceeForCausalLM", "arcee", SILU, {"hidden_act": "relu2"}),
    "tiny-bloom": family(
        "BloomForCausalLM",
        "bloom",
        OTHER_NAMES,
        {
            "hidden_size": 384,
            "n_layer": 4,
            "n_head": 6,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
    ),
    "tiny-cohere": family(
        "CohereForCausalLM",
        "cohere",
        SILU,
        LAYER_NORM,
        NO_HEAD_DIM,
        {"tie_word_embeddings": True, "use_qk_norm": True, "logit_scale": 0.5, "pad_token_id": 0},
    ),
    "tiny-cohere2": family(
        "Cohere2ForCausalLM",
        "cohere2",
        SILU,
        LAYER_NORM,
        WINDOWS,
        {"tie_word_embeddings": True, "logit_scale": 0.5, "pad_token_id": 0},
    ),
    "tiny-cwm": family(
        "CwmForCausalLM",
        "cwm",
        SILU,
        WINDOWS,
        {
            "rope_parameters": ROPE
            | {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
    ),
    "tiny-ernie4_5": family("Ernie4_5ForCausalLM", "ernie4_5", SILU, {"use_bias": False}),
    "tiny-exaone4": family("Exaone4ForCausalLM", "exaone4", SILU, WINDOWS),
    "tiny-exaone": family(
        "ExaoneForCausalLM",
        "exaone",
        {
            "num_hidden_layers": None,
            "rms_norm_eps": None,
            "num_layers": 4,
            "layer_norm_epsilon": 1e-5,
            "activation_function": "silu",
            "head_dim": 80,
            "tie_word_embeddings": False,
            "rope_parameters": ROPE,
        },
    ),
    "tiny-falcon": family(
        "FalconForCausalLM",
        "falcon",
        NO_HEAD_DIM,
        {
            "rms_norm_eps": None,
            "intermediate_size": None,
            "num_key_value_heads": None,
            "num_kv_heads": 2,
            "ffn_hidden_size": 512,
            "layer_norm_epsilon": 1e-5,
            "activation": "gelu",
            "alibi": False,
            "bias": False,
            "multi_query": True,
            "new_decoder_architecture": True,
            "parallel_attn": True,
            "tie_word_embeddings": True,
            "rope_parameters": ROPE,
        },
    ),
    "tiny-glm": family(
        "GlmForCausalLM", "glm", SILU, PARTIAL, {"attention_bias": True, "pad_token_id": 0}
    ),
    "tiny-glm4": family(
        "Glm4ForCausalLM", "glm4", SILU, PARTIAL, {"attention_bias": True, "pad_token_id": 0}
    ),
    "tiny-gpt2": family(
        "GPT2LMHeadModel", "gpt2", GPT, LAYER_NORM, {"n_inner": 192, "tie_word_embeddings": True}
    ),
    "tiny-gpt_bigcode": family(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        GPT,
        LAYER_NORM,
        {
            "n_embd": 256,
            "n_inner": 192,
            "activation_function": "gelu_pytorch_tanh",
            "multi_query": True,
            "tie_word_embeddings": True,
        },
    ),
    "tiny-gpt_neox": family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        LAYER_NORM,
        NO_HEAD_DIM,
        {
            "num_key_value_heads": None,
            "hidden_act": "gelu",
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        },
    ),
    "tiny-gptj": family(
        "GPTJForCausalLM",
        "gptj",
        GPT,
        LAYER_NORM,
        {"rotary_dim": 16, "n_inner": 192, "tie_word_embeddings": False},
    ),
    "tiny-granite": family(
        "GraniteForCausalLM",
        "granite",
        SILU,
        NO_HEAD_DIM,
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.5,
        },
    ),
    "tiny-hunyuan_v1_dense": family(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        SILU,
        {
            "use_qk_norm": True,
            "attention_bias": False,
            "rope_parameters": ROPE | {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0},
        },
    ),
    "tiny-hyperclovax": family(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        SILU,
        {
            "head_dim": 96,
            "use_post_norm": True,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "logits_scaling": 0.7,
        },
    ),
    "tiny-internlm3": family(
        "InternLM3ForCausalLM",
        "internlm3",
        SILU,
        {
            "head_dim": 112,
            "qkv_bias": True,
            "bias": True,
            "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 6.0},
        },
    ),
    "tiny-iquestcoder": family(
        "IQuestCoderForCausalLM", "iquestcoder", SILU, {"head_dim": 128, "num_attention_heads": 2}
    ),
    "tiny-jais2": family(
        "Jais2ForCausalLM",
        "jais2",
        SILU,
        LAYER_NORM,
        {"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    ),
    "tiny-ministral3": family(
        "Ministral3ForCausalLM",
        "ministral3",
        SILU,
        {
            "head_dim": 96,
            "sliding_window": None,
            # What upstream reads of what transformers reads among the rope parameters.
            "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
            "rope_parameters": ROPE
            | {
                "rope_type": "yarn",
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "apply_yarn_scaling": False,  # upstream reads this, and transformers the two above
                "original_max_position_embeddings": 64,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "tiny-mpt": family(
        "MptForCausalLM",
        "mpt",
        OTHER_NAMES,
        {
            "hidden_size": None,
            "d_model": 320,
            "n_layers": 4,
            "n_heads": 4,
            "max_seq_len": 1024,
            "tie_word_embeddings": True,
            "attn_config": {"alibi": True, "alibi_bias_max": 8, "clip_qkv": 2.5},
        },
    ),
    "tiny-nemotron": family(
        "NemotronForCausalLM",
        "nemotron",
        SILU,
        PARTIAL,
        {"rms_norm_eps": None, "norm_eps": 1e-5, "hidden_act": "relu2"},
    ),
    "tiny-olmo": family(
        "OlmoForCausalLM",
        "olmo",
        SILU,
        ALL_HEADS,
        NO_HEAD_DIM,
        {"clip_qkv": 2.5, "pad_token_id": 0},
    ),
    "tiny-olmo2": family("Olmo2ForCausalLM", "olmo2", SILU, NO_HEAD_DIM, {"pad_token_id": 0}),
    "tiny-olmo3": family(
        "Olmo3ForCausalLM", "olmo3", SILU, NO_HEAD_DIM, WINDOWS, BOTH_ROPES, {"pad_token_id": 0}
    ),
    "tiny-opt": family(
        "OPTForCausalLM",
        "opt",
        NO_HEAD_DIM,
        {
            "rms_norm_eps": None,
            "num_key_value_heads": None,
            "intermediate_size": None,
            "ffn_dim": 192,
            "word_embed_proj_dim": 128,
            "activation_function": "relu",
            "do_layer_norm_before": True,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
        },
    ),
    "tiny-persimmon": family(
        "PersimmonForCausalLM",
        "persimmon",
        SILU,
        PARTIAL,
        LAYER_NORM,
        NO_HEAD_DIM,
        {"num_key_value_heads": None, "hidden_act": "relu2", "qk_layernorm": True},
    ),
    "tiny-seed_oss": family(
        "SeedOssForCausalLM",
        "seed_oss",
        SILU,
        {"attention_bias": True, "attention_out_bias": False},
    ),
    "tiny-smollm3": family(
        "SmolLM3ForCausalLM",
        "smollm3",
        SILU,
        {
            "head_dim": 64,
            "tie_word_embeddings": True,
            "no_rope_layers": [1, 0, 1, 0],
            "pad_token_id": 0,
        },
    ),
    "tiny-stablelm": family(
        "StableLmForCausalLM",
        "stablelm",
        SILU,
        LAYER_NORM,
        {
            "use_qkv_bias": True,
            "use_parallel_residual": False,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.25},
        },
    ),
    "tiny-starcoder2": family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        SILU,
        {
            "head_dim": 64,
            "rms_norm_eps": None,
            "norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "use_bias": True,
            "sliding_window": 24,
            "tie_word_embeddings": True,
        },
    ),
    "tiny-gemma": family("GemmaForCausalLM", "gemma", GEMMA, {"num_key_value_heads": 1}),
    "tiny-gemma2": family(
        "Gemma2ForCausalLM",
        "gemma2",
        GEMMA,
        {
            "query_pre_attn_scalar": 24,
            "sliding_window": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 8.0,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "tiny-mistral": family("MistralForCausalLM", "mistral", SILU, {"sliding_window": 24}),
    "tiny-phi": family(
        "PhiForCausalLM",
        "phi",
        SILU,
        ALL_HEADS,
        {
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "intermediate_size": 512,
            "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
        },
    ),
    "tiny-phi3": family(
        "Phi3ForCausalLM",
        "phi3",
        SILU,
        {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 1024,
            "sliding_window": None,
            "pad_token_id": 0,
            "rope_parameters": ROPE
            | {
                "rope_type": "longrope",
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.05 * i for i in range(12)],
                "long_factor": [1.0 + 0.5 * i for i in range(12)],
                "original_max_position_embeddings": 1024,
            },
        },
    ),
    "tiny-qwen2": family("Qwen2ForCausalLM", "qwen2", SILU, {"tie_word_embeddings": True}),
}
