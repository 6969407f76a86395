# SPDX-License-Identifier: Apache-2.0
"""The tiny DeciLM, of whose layers no two are alike, and the Llama that says the same."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllmx.tiny.dense_configs import SILU, family
from vllmx.tiny.twin import Tensors, Twin

WIDEST = 512
"""Inner size of the twin's MLPs, of which the others are a part."""
SIZES = {"hidden_size": 256, "head_dim": 64}


def _block(group: int | None, ffn_mult: float | None) -> dict[str, dict[str, Any]]:
    """A layer; None for a part that it lacks."""
    return {
        "attention": {"n_heads_in_group": group, "no_op": group is None},
        "ffn": {"ffn_mult": ffn_mult, "no_op": ffn_mult is None},
    }


DECILM: dict[str, Any] = family(
    "DeciLMForCausalLM",
    "llama",
    SILU,
    SIZES,
    {
        "intermediate_size": None,
        "num_key_value_heads": None,
        "block_configs": [_block(2, 1.5), _block(None, 1.5), _block(4, None), _block(1, 3.0)],
    },
)
"""Inner sizes are 256, 256 and 512; key heads 2, 1 and 4."""


def decilm_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the checkpoint."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i, block in enumerate(config["block_configs"]):
        layer = f"model.layers.{i}"
        if not block["attention"]["no_op"]:
            keys = queries // block["attention"]["n_heads_in_group"]
            found |= {
                f"{layer}.input_layernorm.weight": (hidden,),
                f"{layer}.self_attn.q_proj.weight": (queries, hidden),
                f"{layer}.self_attn.k_proj.weight": (keys, hidden),
                f"{layer}.self_attn.v_proj.weight": (keys, hidden),
                f"{layer}.self_attn.o_proj.weight": (hidden, queries),
            }
        if not block["ffn"]["no_op"]:
            inner = int(2 * block["ffn"]["ffn_mult"] * hidden / 3)
            found |= {
                f"{layer}.post_attention_layernorm.weight": (hidden,),
                f"{layer}.mlp.gate_proj.weight": (inner, hidden),
                f"{layer}.mlp.up_proj.weight": (inner, hidden),
                f"{layer}.mlp.down_proj.weight": (hidden, inner),
            }
    return found


def _whole(name: str, x: np.ndarray, config: dict[str, Any]) -> Tensors:
    """Key heads once for each query head, MLPs as wide as the widest; what is lacking is zero."""
    head, heads = config["head_dim"], config["num_attention_heads"]
    if name.endswith(("k_proj.weight", "v_proj.weight")):
        each = x.reshape(-1, head, x.shape[-1])
        return {name: np.repeat(each, heads // len(each), axis=0).reshape(-1, x.shape[-1])}
    if ".mlp." in name:
        rows, columns = (0, WIDEST - x.shape[1]), (0, 0)
        if "down_proj" not in name:
            rows, columns = (0, 0), (0, WIDEST - x.shape[0])
        return {name: np.pad(x, (columns, rows))}
    return {name: x} if name != "model.norm.weight" else {name: x, **_lacking(config)}


def _lacking(config: dict[str, Any]) -> Tensors:
    """Tensors of the parts that layers lack."""
    size, found = config["hidden_size"], {}
    queries = config["num_attention_heads"] * config["head_dim"]
    for i, block in enumerate(config["block_configs"]):
        layer = f"model.layers.{i}"
        if block["attention"]["no_op"]:
            found[f"{layer}.input_layernorm.weight"] = np.ones(size, np.float32)
            for part in ("q_proj", "k_proj", "v_proj"):
                found[f"{layer}.self_attn.{part}.weight"] = np.zeros((queries, size), np.float32)
            found[f"{layer}.self_attn.o_proj.weight"] = np.zeros((size, queries), np.float32)
        if block["ffn"]["no_op"]:
            found[f"{layer}.post_attention_layernorm.weight"] = np.ones(size, np.float32)
            for part in ("gate_proj", "up_proj"):
                found[f"{layer}.mlp.{part}.weight"] = np.zeros((WIDEST, size), np.float32)
            found[f"{layer}.mlp.down_proj.weight"] = np.zeros((size, WIDEST), np.float32)
    return found


DECILM_TWIN = Twin(
    family(
        "LlamaForCausalLM",
        "llama",
        SILU,
        SIZES,
        {"intermediate_size": WIDEST, "num_key_value_heads": 4},
    ),
    {},
    _whole,
)
