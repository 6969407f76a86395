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
}
"""Name -> what its config.json says beside SIZES."""


def config_of(name: str) -> dict[str, Any]:
    """config.json of a tiny checkpoint; KeyError for a name that is none."""
    return {**SIZES, **FAMILIES[name]}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint with this config."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries = config["num_attention_heads"] * head
    keys = config["num_key_value_heads"] * head
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    gemma = config["model_type"].startswith("gemma3")
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if gemma else []
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        found[f"{layer}.self_attn.q_proj.weight"] = (queries, hidden)
        found[f"{layer}.self_attn.k_proj.weight"] = (keys, hidden)
        found[f"{layer}.self_attn.v_proj.weight"] = (keys, hidden)
        found[f"{layer}.self_attn.o_proj.weight"] = (hidden, queries)
        if gemma or config["model_type"] == "qwen3":
            found[f"{layer}.self_attn.q_norm.weight"] = (head,)
            found[f"{layer}.self_attn.k_norm.weight"] = (head,)
        for part in ("gate_proj", "up_proj"):
            found[f"{layer}.mlp.{part}.weight"] = (inner, hidden)
        found[f"{layer}.mlp.down_proj.weight"] = (hidden, inner)
        found |= {f"{layer}.{norm}.weight": (hidden,) for norm in norms}
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def weight(name: str, tensor: str, shape: tuple[int, ...], gemma: bool) -> np.ndarray:
    """float32, near normal (a sum of twelve uniforms), from a counter keyed by both names."""
    key = np.frombuffer(hashlib.sha256(f"{name}/{tensor}".encode()).digest()[:16], "<u8")
    count = int(np.prod(shape))
    words = np.random.Philox(key=key).random_raw(3 * count).astype("<u8").view("<u2")
    normal = (words.reshape(count, 12).sum(axis=1, dtype=np.int64) - 6 * 65535) / 65536.0
    if len(shape) == 1:
        normal = normal * 0.1 + (0.0 if gemma else 1.0)  # Gemma stores its norms less one
    else:
        normal = normal * (2.0 / np.sqrt(shape[-1]))
    return normal.reshape(shape).astype(np.float32)


def save(name: str, folder: Path) -> None:
    """Write the checkpoint `name` into `folder`."""
    config = config_of(name)
    gemma = config["model_type"].startswith("gemma3")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {key: weight(name, key, shape, gemma) for key, shape in shapes(config).items()}
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
