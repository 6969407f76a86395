# SPDX-License-Identifier: Apache-2.0
"""Which tensors a checkpoint with a given config has, as the model hub names them."""

from __future__ import annotations

from typing import Any

from vllmx.tiny.decilm import decilm_shapes
from vllmx.tiny.dense_tensors import LAYOUTS as DENSE_LAYOUTS
from vllmx.tiny.dense_tensors import Layout, shapes_of
from vllmx.tiny.latent import LATENT_LAYOUTS
from vllmx.tiny.sparse import TYPES as SPARSE_TYPES
from vllmx.tiny.sparse import sparse_attention, sparse_mlp
from vllmx.tiny.sparse_layouts import SPARSE_LAYOUTS
from vllmx.tiny.twins import TWIN_LAYOUTS

LAYOUTS = DENSE_LAYOUTS | SPARSE_LAYOUTS | LATENT_LAYOUTS | TWIN_LAYOUTS
"""By model_type or, before that, by architecture: families whose tensors are written in letters."""

Shapes = dict[str, tuple[int, ...]]
"""Name of a tensor -> its shape."""


def shapes(config: dict[str, Any]) -> Shapes:
    """Name -> shape of every tensor of a checkpoint with this config."""
    text = config.get("text_config", config)
    if "block_configs" in text:
        return decilm_shapes(text)
    if (layout := layout_of(config)) is not None:
        return shapes_of(layout, text)
    hidden, model = text["hidden_size"], "model"
    if text is not config:
        model = "model.language_model"
    found: Shapes = {f"{model}.embed_tokens.weight": (text["vocab_size"], hidden)}
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if text["model_type"].startswith("gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i, kind in enumerate(kinds):
        layer = f"{model}.layers.{i}"
        parts = _linear_attention(text) if kind == "linear_attention" else _attention(text)
        sparse = "num_experts" in text and i not in text.get("mlp_only_layers", [])
        if text["model_type"] in SPARSE_TYPES:
            parts |= sparse_mlp(text, i) | sparse_attention(text)
        else:
            parts |= _experts(text) if sparse else _mlp(hidden, text["intermediate_size"])
        parts |= {f"{norm}.weight": (hidden,) for norm in norms}
        found |= {f"{layer}.{part}": shape for part, shape in parts.items()}
    found[f"{model}.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (text["vocab_size"], hidden)
    return found


def layout_of(config: dict[str, Any]) -> Layout | None:
    """The layout of a checkpoint with this config; None where it is not written in letters."""
    text = config.get("text_config", config)
    keys = (config["architectures"][0], text["model_type"])
    return next((LAYOUTS[key] for key in keys if key in LAYOUTS), None)


def _attention(config: dict[str, Any]) -> Shapes:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    gated = "linear_num_key_heads" in config
    found: Shapes = {
        "self_attn.q_proj.weight": (queries * (1 + gated), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if config["model_type"].startswith(("gemma3", "qwen3")):
        found["self_attn.q_norm.weight"] = (head,)
        found["self_attn.k_norm.weight"] = (head,)
    return found


def _linear_attention(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    parts = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":  # rows of all parts, key head by key head
        parts = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    projections: Shapes = {
        f"linear_attn.in_proj_{n}.weight": (rows, hidden) for n, rows in parts.items()
    }
    return {
        **projections,
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mlp(hidden: int, inner: int, prefix: str = "mlp") -> Shapes:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _experts(config: dict[str, Any]) -> Shapes:
    """Experts one by one in Qwen3-Next, stacked in Qwen3.5."""
    hidden, inner, count = (
        config[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    found: Shapes = {
        "mlp.gate.weight": (count, hidden),
        "mlp.shared_expert_gate.weight": (1, hidden),
    }
    found |= _mlp(hidden, config["shared_expert_intermediate_size"], "mlp.shared_expert")
    if config["model_type"] == "qwen3_next":
        for expert in range(count):
            found |= _mlp(hidden, inner, f"mlp.experts.{expert}")
        return found
    found["mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
    found["mlp.experts.down_proj"] = (count, hidden, inner)
    return found
