# SPDX-License-Identifier: Apache-2.0
"""The one registry of tiny models: what config.json of each says."""

from __future__ import annotations

from typing import Any

from vllmx.tiny.dense_configs import DENSE_FAMILIES, NULL
from vllmx.tiny.head_sizes import HEAD_SIZES
from vllmx.tiny.latent import LATENT_FAMILIES
from vllmx.tiny.margins import SUFFIX, routing_of
from vllmx.tiny.sparse import SPARSE_FAMILIES
from vllmx.tiny.sparse_configs import MORE_SPARSE
from vllmx.tiny.twins import TWIN_FAMILIES

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "norm_topk_prob": True,
}
VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
}
"""A tower that upstream wants to be described, and that no tensor is of."""
FAMILIES: dict[str, dict[str, Any]] = {
    **DENSE_FAMILIES,
    "tiny-llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_parameters": ROPE,
    },
    "tiny-qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "rope_parameters": ROPE,
    },
    "tiny-gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 32,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": ROPE,
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    },
    "tiny-qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "layer_types": LINEAR_LAYERS,
        "mlp_only_layers": [1],
        **LINEAR,
        **EXPERTS,
    },
    "tiny-qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "layer_types": LINEAR_LAYERS,
            **LINEAR,
            **EXPERTS,
        },
        "vision_config": VISION,
    },
    "tiny-qwen3_5": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "layer_types": LINEAR_LAYERS,
            **LINEAR,
        },
        "vision_config": VISION,
    },
    **SPARSE_FAMILIES,
    **MORE_SPARSE,
    **LATENT_FAMILIES,
    **TWIN_FAMILIES,
}
"""Name -> what its config.json says beside SIZES, which a text_config takes where there is one."""
HYBRIDS = ("tiny-qwen3_5", "tiny-qwen3_5_moe", "tiny-qwen3_next")
"""Models with a golden in bfloat16."""
WITH_EXPERTS = tuple(
    name for name, family in FAMILIES.items() if routing_of(family.get("text_config", family))
)
"""Models whose routers choose experts."""
SISTERS = tuple(name for name in FAMILIES if name in (*HYBRIDS, *WITH_EXPERTS))
"""Models that have a sister NAME-bf16, whose weights decide by more than bfloat16 rounds
(margins.py)."""


def _with_head(family: dict[str, Any]) -> dict[str, Any]:
    """The same with a head of its own, which a sister's has to be."""
    untied = {"tie_word_embeddings": False}
    text = {"text_config": family["text_config"] | untied} if "text_config" in family else {}
    return family | untied | text


FAMILIES |= {name + SUFFIX: _with_head(FAMILIES[name]) for name in SISTERS}


def config_of(name: str) -> dict[str, Any]:
    """config.json of a tiny checkpoint; KeyError for a name that is none."""
    family = FAMILIES[name]
    own = HEAD_SIZES.get(name) or HEAD_SIZES.get(name.removesuffix(SUFFIX), {})
    if "text_config" not in family:
        said = {**SIZES, **family, **own}
        kept = {key: value for key, value in said.items() if value is not None}
        return {key: None if value is NULL else value for key, value in kept.items()}
    text = {**SIZES, **family["text_config"], **own}
    return {**family, "dtype": SIZES["dtype"], "text_config": text}
