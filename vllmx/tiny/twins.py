# SPDX-License-Identifier: Apache-2.0
"""Families that transformers has no class for: their tiny models, and twins that it has one for.

A twin is the same weights in another family's layout, in the folder `twin` of the checkpoint. Where
the names of the tensors agree, the checkpoint's own config.json is enough: it says what upstream
reads and what transformers reads beside it, under the model_type that transformers knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vllmx.tiny.dense_configs import GPT, NO_HEAD_DIM, ROPE, SILU, family
from vllmx.tiny.dense_tensors import (
    EMBED,
    ENDS,
    GATED,
    LLAMA,
    NORMS,
    OUT,
    QKV,
    Layout,
    biases,
    named,
    with_biases,
)
from vllmx.tiny.more_twins import MORE_TWIN_FAMILIES, MORE_TWIN_LAYOUTS, MORE_TWINS
from vllmx.tiny.sparse_layouts import EACH, GATE, SHARED
from vllmx.tiny.twin import Tensors, Twin


def _internlm2(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    if ".wqkv." not in name:
        return {name: x}
    keys, head = config["num_key_value_heads"], config["head_dim"]
    rows = x.reshape(keys, -1, head, x.shape[-1])
    parts = {"q": rows[:, :-2], "k": rows[:, -2], "v": rows[:, -1]}
    return {
        name.replace("attention.wqkv", f"self_attn.{n}_proj"): part.reshape(-1, x.shape[-1])
        for n, part in parts.items()
    }


def _chatglm(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    if ".query_key_value." not in name:
        return {name: x}
    queries = config["num_attention_heads"] * config["kv_channels"]
    keys = config["multi_query_group_num"] * config["kv_channels"]
    parts = np.split(x, [queries, queries + keys])
    return {
        name.replace("self_attention.query_key_value", f"self_attn.{n}_proj"): part
        for n, part in zip("qkv", parts)
    }


def _deepseek(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Halves of a head are rotated, and pairs of neighbours in ERNIE: its rows take turns."""
    if ".q_proj." in name or ".k_proj." in name:
        heads = x.reshape(
            -1, 2, config["hidden_size"] // config["num_attention_heads"] // 2, x.shape[-1]
        )
        return {name: heads.transpose(0, 2, 1, 3).reshape(x.shape)}
    if not name.endswith("mlp.gate.weight"):
        return {name: x}
    bias = name.replace("mlp.gate.weight", "mlp.moe_statics.e_score_correction_bias")
    return {name: x, bias: np.zeros((1, len(x)), x.dtype)}


def _telechat2(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Keys and values apart; Llama's biases are of all matrices, here zero where there are none."""
    head = config["hidden_size"] // config["num_attention_heads"]
    parts = {name: x}
    if ".key_value." in name:
        rows = x.reshape(-1, 2, head, x.shape[-1])
        parts = {
            name.replace("key_value", n): rows[:, i].reshape(-1, x.shape[-1])
            for i, n in enumerate(("k_proj", "v_proj"))
        }
    for source, part in list(parts.items()):
        if any(n in source for n in ("k_proj", "v_proj", "query", "gate_proj", "up_proj")):
            parts[source.removesuffix("weight") + "bias"] = np.zeros(len(part), x.dtype)
    return parts


TWIN_FAMILIES: dict[str, dict[str, Any]] = {
    **MORE_TWIN_FAMILIES,
    "tiny-chatglm": family(
        "ChatGLMModel",
        "chatglm",
        {key: None for key in GPT if key in ("num_hidden_layers", "intermediate_size", "head_dim")},
        {
            "vocab_size": None,
            "num_key_value_heads": None,
            "max_position_embeddings": None,
            "rms_norm_eps": None,
            "padded_vocab_size": 1024,
            "hidden_size": 256,
            "num_layers": 4,
            "ffn_hidden_size": 192,
            "kv_channels": 64,
            "seq_length": 1024,
            "layernorm_epsilon": 1e-5,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "add_qkv_bias": True,
            "add_bias_linear": False,
            "rmsnorm": True,
            "original_rope": True,
            "tie_word_embeddings": False,
        },
    ),
    "tiny-deepseek": family(
        "DeepseekForCausalLM",
        "deepseek_v2",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "n_routed_experts": 8,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "scoring_func": "softmax",
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
            "v_head_dim": 0,
            "kv_lora_rank": 0,
        },
    ),
    "tiny-internlm2": family(
        "InternLM2ForCausalLM", "llama", SILU, {"head_dim": 96, "hidden_size": 384}
    ),
    "tiny-mimo": family("MiMoForCausalLM", "qwen2", SILU, {"head_dim": 64, "hidden_size": 256}),
    "tiny-minicpm": family(
        "MiniCPMForCausalLM",
        "granite",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 256,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 128,
            "attention_multiplier": 0.125,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "logits_scaling": 2.0,
        },
    ),
    "tiny-orion": family(
        "OrionForCausalLM",
        "stablelm",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 448,
            "layer_norm_eps": 1e-5,
            "use_qkv_bias": False,
            "use_parallel_residual": False,
            "rope_parameters": ROPE | {"partial_rotary_factor": 1.0},
        },
    ),
    "tiny-telechat2": family(
        "TeleChat2ForCausalLM",
        "llama",
        SILU,
        NO_HEAD_DIM,
        {
            "hidden_size": 320,
            "num_key_value_heads": 4,
            "n_layer": 4,
            "n_head": 4,
            "ffn_hidden_size": 192,
            "layer_norm_epsilon": 1e-5,
        },
    ),
}
"""As FAMILIES of vllmx/tiny/configs.py."""

TWIN_LAYOUTS: dict[str, Layout] = {
    **MORE_TWIN_LAYOUTS,
    "ChatGLMModel": Layout(
        with_biases(named("Q+2K H", "self_attention.query_key_value"))
        | named("H Q", "self_attention.dense")
        | named("2I H", "mlp.dense_h_to_4h")
        | named("H I", "mlp.dense_4h_to_h")
        | NORMS,
        layers="transformer.encoder.layers",
        outer=named("V H", "transformer.embedding.word_embeddings")
        | named("H", "transformer.encoder.final_layernorm"),
        head=named("V H", "transformer.output_layer"),
    ),
    "DeepseekForCausalLM": Layout(
        QKV | OUT | NORMS,
        sparse=GATE | EACH | SHARED,
        dense=GATED,
        is_sparse=lambda config, layer: layer >= config.first_k_dense_replace,
    ),
    "InternLM2ForCausalLM": Layout(
        named("Q+2K H", "attention.wqkv")
        | named("H Q", "attention.wo")
        | named("I H", "feed_forward.w1", "feed_forward.w3")
        | named("H I", "feed_forward.w2")
        | named("H", "attention_norm", "ffn_norm"),
        outer=named("V H", "model.tok_embeddings") | named("H", "model.norm"),
        head=named("V H", "output"),
    ),
    "MiMoForCausalLM": Layout(LLAMA | biases(QKV)),
    "MiniCPMForCausalLM": Layout(LLAMA),
    "OrionForCausalLM": Layout(QKV | OUT | GATED | with_biases(NORMS), outer=ENDS | EMBED),
    "TeleChat2ForCausalLM": Layout(
        named("Q H", "self_attention.query")
        | named("2K H", "self_attention.key_value")
        | named("I H", "mlp.gate_proj", "mlp.up_proj")
        | with_biases(named("H Q", "self_attention.dense"), named("H I", "mlp.down_proj"))
        | NORMS,
        layers="transformer.h",
        outer=named("V H", "transformer.word_embeddings") | named("H", "transformer.ln_f"),
    ),
}
"""By architecture: their model_type is another family's."""

TWINS: dict[str, Twin] = {
    **MORE_TWINS,
    "tiny-chatglm": Twin(
        family(
            "GlmForCausalLM",
            "glm",
            SILU,
            {
                "head_dim": 64,
                "hidden_size": 256,
                "attention_bias": True,
                "pad_token_id": 0,
                "rope_parameters": ROPE | {"partial_rotary_factor": 0.5},
            },
        ),
        {
            "transformer.embedding.word_embeddings.": "model.embed_tokens.",
            "transformer.encoder.final_layernorm.": "model.norm.",
            "transformer.encoder.layers.": "model.layers.",
            "transformer.output_layer.": "lm_head.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".dense_h_to_4h.": ".gate_up_proj.",
            ".dense_4h_to_h.": ".down_proj.",
        },
        _chatglm,
    ),
    "tiny-deepseek": Twin(
        family(
            "Ernie4_5_MoeForCausalLM",
            "ernie4_5_moe",
            SILU,
            {
                "head_dim": 64,
                "hidden_size": 256,
                "use_bias": False,
                "moe_k": 3,
                "moe_num_experts": 8,
                "moe_num_shared_experts": 2,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": 3,
                "moe_intermediate_size": 64,
            },
        ),
        {},
        _deepseek,
    ),
    "tiny-internlm2": Twin(
        family("LlamaForCausalLM", "llama", SILU, {"head_dim": 96, "hidden_size": 384}),
        {
            "model.tok_embeddings.": "model.embed_tokens.",
            "output.": "lm_head.",
            ".attention_norm.": ".input_layernorm.",
            ".ffn_norm.": ".post_attention_layernorm.",
            ".attention.wo.": ".self_attn.o_proj.",
            ".feed_forward.w1.": ".mlp.gate_proj.",
            ".feed_forward.w3.": ".mlp.up_proj.",
            ".feed_forward.w2.": ".mlp.down_proj.",
        },
        _internlm2,
    ),
    "tiny-telechat2": Twin(
        family(
            "LlamaForCausalLM",
            "llama",
            SILU,
            {
                "head_dim": 80,
                "hidden_size": 320,
                "num_key_value_heads": 4,
                "attention_bias": True,
                "mlp_bias": True,
            },
        ),
        {
            "transformer.word_embeddings.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".self_attention.query.": ".self_attn.q_proj.",
            ".self_attention.": ".self_attn.",
        },
        _telechat2,
    ),
}
