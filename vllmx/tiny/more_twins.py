# SPDX-License-Identifier: Apache-2.0
"""As twins.py: families that came later, from Bailing to Tele-FLM."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllmx.tiny.decilm import DECILM, DECILM_TWIN
from vllmx.tiny.dense_configs import NO_HEAD_DIM, ROPE, SILU, WINDOWS, family
from vllmx.tiny.dense_tensors import (
    FUSED_GATED,
    GATED,
    LLAMA,
    NORMS,
    OUT,
    QKV,
    Layout,
    named,
    with_biases,
)
from vllmx.tiny.sparse_configs import BAILING, NARROW
from vllmx.tiny.sparse_layouts import BAILING as BAILING_LAYER
from vllmx.tiny.sparse_layouts import BAILING_ENDS, EACH, GATE, SHARED
from vllmx.tiny.twin import Tensors, Twin

BASES = {
    "sliding_attention": ROPE,
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}


def _bailing(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Projections apart; the gate on what all tokens take, which lets half of it through, is made
    up for exactly."""
    if ".query_key_value." in name:
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        return {
            name.replace("attention.query_key_value", f"self_attn.{n}_proj"): part
            for n, part in zip("qkv", np.split(x, [queries, queries + keys]))
        }
    if name.endswith("mlp.gate.weight"):
        gate = name.replace("mlp.gate", "mlp.shared_expert_gate")
        return {name: x, gate: np.zeros((1, x.shape[1]), x.dtype)}
    return {name: 2 * x if ".shared_experts.down_proj." in name else x}


def _plamo3(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Stacked matrices apart; norms less one, as Gemma has them; rows of the embedding less what
    Gemma multiplies them with, a power of two."""
    if ".qkv_proj." in name:
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        parts = np.split(x, [queries, queries + keys])
        return {name.replace("qkv_", f"{n}_"): part for n, part in zip("qkv", parts)}
    if ".gate_up_proj." in name:
        return {name.replace("gate_up", n): p for n, p in zip(("gate", "up"), np.split(x, 2))}
    if "embed_tokens" in name:
        return {name: x / np.float32(config["hidden_size"] ** 0.5)}
    offsets = {".post_mixer_norm.": 1 / 5 - 1, ".post_mlp_norm.": 1 / 5**1.5 - 1}
    offset = next((value for part, value in offsets.items() if part in name), 0.0)
    return {name: x + np.float32(offset)}


MORE_TWIN_FAMILIES: dict[str, dict[str, Any]] = {
    "tiny-decilm": DECILM,
    "tiny-bailing_moe": family(
        "BailingMoeForCausalLM",
        "qwen2_moe",
        SILU,
        NARROW,
        BAILING,
        {
            "head_dim": 96,
            "hidden_size": 384,
            "use_qkv_bias": True,
            "use_qk_norm": False,
            "n_group": None,
            "topk_group": None,
            "score_function": "softmax",
            "moe_router_enable_expert_bias": False,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "num_shared_experts": 2,
        },
    ),
    "tiny-bailing_moe_v2": family(
        "BailingMoeV2ForCausalLM",
        "sarvam_moe",
        SILU,
        NARROW,
        BAILING,
        {
            "head_dim": 80,
            "rotary_dim": 40,
            "partial_rotary_factor": 0.5,
            "first_k_dense_replace": 2,
            "num_shared_experts": 1,
        },
    ),
    "tiny-pangu_embedded": family(
        "PanguEmbeddedForCausalLM", "llama", SILU, {"head_dim": 80, "attention_bias": True}
    ),
    "tiny-param2moe": family(
        "Param2MoEForCausalLM",
        "sarvam_moe",
        SILU,
        NARROW,
        BAILING,
        {
            "head_dim": 96,
            "first_k_dense_replace": 1,
            "num_shared_experts": 2,
            "moe_shared_expert_intermediate_size": 128,
        },
    ),
    "tiny-plamo3": family(
        "Plamo3ForCausalLM",
        "gemma3_text",
        SILU,
        WINDOWS,
        {
            "hidden_size": 256,
            "head_dim": 64,
            "interleaved_sliding_window": [24, 24, 24, None],
            "rope_parameters": BASES,
        },
    ),
    "tiny-rnj1": family(
        "Rnj1ForCausalLM",
        "gemma3_text",
        {
            "head_dim": 96,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 64,
            "final_logit_softcapping": 8.0,
            "layer_types": ["full_attention"] * 4,
            "rope_parameters": {
                "sliding_attention": ROPE,
                "full_attention": ROPE
                | {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 256,
                },
            },
        },
    ),
    "tiny-teleflm": family(
        "TeleFLMForCausalLM",
        "granite",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "use_mup": True,
            "input_mult": 3.0,
            "output_mult": 4.0,
            "mup_scale_factor": 8.0,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 2.0,
        },
    ),
}
"""As TWIN_FAMILIES of twins.py."""

MORE_TWIN_LAYOUTS: dict[str, Layout] = {
    "BailingMoeForCausalLM": Layout(
        BAILING_LAYER | {"attention.query_key_value.bias": "Q+2K"},
        sparse=GATE | EACH | SHARED,
        dense=GATED,
        is_sparse=lambda config, layer: layer >= config.first_k_dense_replace,
        outer=BAILING_ENDS,
    ),
    "PanguEmbeddedForCausalLM": Layout(with_biases(QKV, OUT) | GATED | NORMS),
    "Plamo3ForCausalLM": Layout(
        named("Q+2K H", "mixer.qkv_proj")
        | named("H Q", "mixer.o_proj")
        | named("D", "mixer.q_norm", "mixer.k_norm")
        | FUSED_GATED
        | named("H", "pre_mixer_norm", "post_mixer_norm", "pre_mlp_norm", "post_mlp_norm"),
        layers="model.layers.layers",
    ),
    "TeleFLMForCausalLM": Layout(LLAMA),
}
"""By architecture, where it is not that of the model_type."""

MORE_TWINS: dict[str, Twin] = {
    "tiny-decilm": DECILM_TWIN,
    "tiny-bailing_moe": Twin(
        family(
            "Qwen2MoeForCausalLM",
            "qwen2_moe",
            SILU,
            NARROW,
            {
                "head_dim": 96,
                "hidden_size": 384,
                "qkv_bias": True,
                "num_experts": 8,
                "num_experts_per_tok": 3,
                "shared_expert_intermediate_size": 128,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [0],
            },
        ),
        {
            "model.word_embeddings.": "model.embed_tokens.",
            ".attention.dense.": ".self_attn.o_proj.",
            ".mlp.shared_experts.": ".mlp.shared_expert.",
        },
        _bailing,
    ),
    "tiny-plamo3": Twin(
        family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            WINDOWS,
            {
                "hidden_size": 256,
                "head_dim": 64,
                "hidden_activation": "silu",
                "tie_word_embeddings": False,
                "query_pre_attn_scalar": 64,
                "rope_parameters": BASES,
            },
        ),
        {
            "model.layers.layers.": "model.layers.",
            ".mixer.": ".self_attn.",
            ".pre_mixer_norm.": ".input_layernorm.",
            ".post_mixer_norm.": ".post_attention_layernorm.",
            ".pre_mlp_norm.": ".pre_feedforward_layernorm.",
            ".post_mlp_norm.": ".post_feedforward_layernorm.",
        },
        _plamo3,
    ),
}
