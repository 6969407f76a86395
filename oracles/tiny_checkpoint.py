# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with weights drawn from counter bits: the same bytes on every machine.

`python -m oracles.tiny_checkpoint NAME FOLDER` writes config.json and model.safetensors, in the
layout of the model hub, that upstream, transformers and vllmx all load. Weights are larger than a
trained model's, so that attention is peaked and positions matter. numpy and safetensors only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

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
}
"""Name -> what its config.json says beside SIZES, which a text_config takes where there is one."""


def config_of(name: str) -> dict[str, Any]:
    """config.json of a tiny checkpoint; KeyError for a name that is none."""
    family = FAMILIES[name]
    if "text_config" not in family:
        return {**SIZES, **family}
    return {**family, "dtype": SIZES["dtype"], "text_config": {**SIZES, **family["text_config"]}}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint with this config."""
    text = config.get("text_config", config)
    hidden, model = text["hidden_size"], "model"
    if text is not config:
        model = "model.language_model"
    found: dict[str, tuple[int, ...]] = {
        f"{model}.embed_tokens.weight": (text["vocab_size"], hidden)
    }
    kinds = text.get("layer_types") or ["full_attention"] * text["num_hidden_layers"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    if text["model_type"].startswith("gemma3"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    for i, kind in enumerate(kinds):
        layer = f"{model}.layers.{i}"
        parts = _linear_attention(text) if kind == "linear_attention" else _attention(text)
        sparse = "num_experts" in text and i not in text.get("mlp_only_layers", [])
        parts |= _experts(text) if sparse else _mlp(hidden, text["intermediate_size"])
        parts |= {f"{norm}.weight": (hidden,) for norm in norms}
        found |= {f"{layer}.{part}": shape for part, shape in parts.items()}
    found[f"{model}.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (text["vocab_size"], hidden)
    return found


def _attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, head = config["hidden_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    gated = "linear_num_key_heads" in config
    found: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries * (1 + gated), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
    }
    if config["model_type"].startswith(("gemma3", "qwen3")):
        found["self_attn.q_norm.weight"] = (head,)
        found["self_attn.k_norm.weight"] = (head,)
    return found


def _linear_attention(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    parts = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    if config["model_type"] == "qwen3_next":  # rows of all parts, key head by key head
        parts = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    projections = {f"linear_attn.in_proj_{n}.weight": (rows, hidden) for n, rows in parts.items()}
    return {
        **projections,
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _mlp(hidden: int, inner: int, prefix: str = "mlp") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }


def _experts(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Experts one by one in Qwen3-Next, stacked in Qwen3.5."""
    hidden, inner, count = (
        config[key] for key in ("hidden_size", "moe_intermediate_size", "num_experts")
    )
    found = {"mlp.gate.weight": (count, hidden), "mlp.shared_expert_gate.weight": (1, hidden)}
    found |= _mlp(hidden, config["shared_expert_intermediate_size"], "mlp.shared_expert")
    if config["model_type"] == "qwen3_next":
        for expert in range(count):
            found |= _mlp(hidden, inner, f"mlp.experts.{expert}")
        return found
    found["mlp.experts.gate_up_proj"] = (count, 2 * inner, hidden)
    found["mlp.experts.down_proj"] = (count, hidden, inner)
    return found


def weight(name: str, tensor: str, shape: tuple[int, ...], less_one: bool) -> np.ndarray:
    """float32, near normal (a sum of twelve uniforms), from a counter keyed by both names.

    less_one: norms are stored less one, as Gemma's are.
    """
    key = np.frombuffer(hashlib.sha256(f"{name}/{tensor}".encode()).digest()[:16], "<u8")
    count = int(np.prod(shape))
    words = np.random.Philox(key=key).random_raw(3 * count).astype("<u8").view("<u2")
    normal = (words.reshape(count, 12).sum(axis=1, dtype=np.int64) - 6 * 65535) / 65536.0
    if tensor.endswith("A_log"):
        normal = normal - 2.0  # memories of a few tokens, and of some dozens
    elif len(shape) == 1:
        stored = less_one and not tensor.endswith(("linear_attn.norm.weight", "dt_bias"))
        normal = normal * 0.1 + (0.0 if stored else 1.0)
    else:
        normal = normal * (2.0 / np.sqrt(shape[-1]))
    return normal.reshape(shape).astype(np.float32)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    """x rounded to what bfloat16 holds, ties to even, still float32."""
    bits = x.view(np.uint32)
    even = (bits >> 16) & 1
    return ((bits + 0x7FFF + even) & np.uint32(0xFFFF0000)).view(np.float32)


def save(name: str, folder: Path) -> None:
    """Write the checkpoint `name` into `folder`."""
    config = config_of(name)
    less_one = config["model_type"].startswith(("gemma3", "qwen3_"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {key: weight(name, key, shape, less_one) for key, shape in shapes(config).items()}
    if "num_experts" in config.get("text_config", config):
        # A provider that rounds weights to half precision must send tokens to the same experts.
        tensors = {key: as_bfloat16(tensor) for key, tensor in tensors.items()}
    save_file(tensors, str(folder / "model.safetensors"), {"format": "pt"})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=sorted(FAMILIES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    save(args.name, args.folder)


if __name__ == "__main__":
    main()
