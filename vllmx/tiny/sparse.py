# SPDX-License-Identifier: Apache-2.0
"""Tiny models with experts and attention in every layer: their configs, and their tensors."""

from __future__ import annotations

from typing import Any

Shapes = dict[str, tuple[int, ...]]

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "rope_parameters": ROPE}
SPARSE_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **COMMON,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "tiny-qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **COMMON,
        "qkv_bias": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    },
    "tiny-qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **COMMON,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "tiny-glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        **COMMON,
        "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "norm_topk_prob": True,
    },
    "tiny-granitemoe": {
        "architectures": ["GraniteMoeForCausalLM"],
        "model_type": "granitemoe",
        **COMMON,
        "tie_word_embeddings": True,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.125,
        "residual_multiplier": 0.5,
        "logits_scaling": 2.0,
    },
    "tiny-olmoe": {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        **COMMON,
        "intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
}
"""As FAMILIES of vllmx/tiny/configs.py."""
TYPES = tuple(family["model_type"] for family in SPARSE_FAMILIES.values())


def mlp(hidden: int, inner: int, prefix: str, names: str = "gate_proj up_proj down_proj") -> Shapes:
    """The three matrices of one gated MLP."""
    gate, up, down = names.split()
    return {
        f"{prefix}.{gate}.weight": (inner, hidden),
        f"{prefix}.{up}.weight": (inner, hidden),
        f"{prefix}.{down}.weight": (hidden, inner),
    }


def sparse_mlp(config: dict[str, Any], layer: int) -> Shapes:
    """What stands for the MLP in layer `layer`: experts one by one, or one MLP."""
    kind, hidden = config["model_type"], config["hidden_size"]
    if layer in config.get("mlp_only_layers", []) or layer < config.get("first_k_dense_replace", 0):
        return mlp(hidden, config["intermediate_size"], "mlp")
    count = next(
        config[key]
        for key in ("num_local_experts", "num_experts", "n_routed_experts")
        if key in config
    )
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    prefix, names = "mlp", "gate_proj up_proj down_proj"
    if kind == "mixtral":
        prefix, names = "block_sparse_moe", "w1 w3 w2"
    if kind == "granitemoe":
        return {
            "block_sparse_moe.router.layer.weight": (count, hidden),
            "block_sparse_moe.input_linear.weight": (count, 2 * inner, hidden),
            "block_sparse_moe.output_linear.weight": (count, hidden, inner),
        }
    found: Shapes = {f"{prefix}.gate.weight": (count, hidden)}
    for expert in range(count):
        found |= mlp(hidden, inner, f"{prefix}.experts.{expert}", names)
    if kind == "qwen2_moe":
        found |= mlp(hidden, config["shared_expert_intermediate_size"], "mlp.shared_expert")
        found["mlp.shared_expert_gate.weight"] = (1, hidden)
    if kind == "glm4_moe":
        found |= mlp(hidden, inner * config["n_shared_experts"], "mlp.shared_experts")
        found["mlp.gate.e_score_correction_bias"] = (count,)
    return found


def sparse_attention(config: dict[str, Any]) -> Shapes:
    """What these families have beside the four projections: biases, and norms."""
    head = config["head_dim"]
    sizes = {"q": config["num_attention_heads"] * head, "k": config["num_key_value_heads"] * head}
    found: Shapes = {}
    if config.get("qkv_bias") or config.get("attention_bias"):
        found |= {
            f"self_attn.{part}_proj.bias": (sizes["q" if part == "q" else "k"],) for part in "qkv"
        }
    whole = config["model_type"] == "olmoe"
    if whole or config.get("use_qk_norm") or config["model_type"] == "qwen3_moe":
        found |= {
            f"self_attn.{p}_norm.weight": (size if whole else head,) for p, size in sizes.items()
        }
    return found
