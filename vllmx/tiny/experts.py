# SPDX-License-Identifier: Apache-2.0
"""A dense Llama as a Mixtral that says the same: each MLP cut into experts.

The inner neurons of an MLP are shared out among GROUPS experts, all of which a token takes: their
sum is what the MLP was. There are REPLICAS of them, and the router, one random direction and its
opposite, sends some tokens to one and the rest to the other. A weight of 1 / GROUPS, which a router
gives to equal scores, is undone in the down projection: a power of two, exact in every dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from vllmx.config import VllmConfig
from vllmx.exceptions import UserError
from vllmx.layers.parameter import to_float
from vllmx.model_loader.tokenizer import Tokenizer, get_tokenizer
from vllmx.model_loader.weights import iterate_weights
from vllmx.models.hf_config import HFConfig

GROUPS = 4
REPLICAS = 2
KEPT = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
    *("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id"),
)
PARTS = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def sparse_config(config: HFConfig) -> dict[str, Any]:
    """config.json of the Mixtral; UserError where `config` is of no such Llama."""
    for key, wanted in (("model_type", "llama"), ("attention_bias", False), ("mlp_bias", False)):
        found = config.read(key, (str, bool), None)
        if found != wanted:
            raise UserError(
                f"{config.origin}: {key} is {found!r}; only a Llama without biases can be cut "
                "into experts."
            )
    if config.intermediate_size % GROUPS:
        raise UserError(
            f"{config.origin}: intermediate_size is {config.intermediate_size}, which {GROUPS} "
            "experts can't share."
        )
    return {
        **{key: getattr(config, key) for key in KEPT if key in config},
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "float32",
        "intermediate_size": config.intermediate_size // GROUPS,
        "num_local_experts": GROUPS * REPLICAS,
        "num_experts_per_tok": GROUPS,
        "sliding_window": None,
    }


def sparse_weights(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Tensor]]:
    """A Llama's (name, weight) pairs as the Mixtral's, in float32."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights:
        dense = to_float(weight)
        layer, _, part = name.removesuffix(".weight").partition(".mlp.")
        if part not in PARTS:
            yield name, dense.contiguous()
            continue
        block = f"{layer}.block_sparse_moe"
        pieces = dense.chunk(GROUPS, dim=1 if part == "down_proj" else 0)
        for expert in range(GROUPS * REPLICAS):
            piece = pieces[expert % GROUPS]
            scaled = piece * GROUPS if part == "down_proj" else piece.clone()
            yield f"{block}.experts.{expert}.{PARTS[part]}.weight", scaled
        if part == "gate_proj":
            direction = torch.randn(1, dense.shape[1], generator=generator)
            rows = torch.cat((direction.expand(GROUPS, -1), -direction.expand(GROUPS, -1)))
            yield f"{block}.gate.weight", rows


def save_sparse(vllm_config: VllmConfig, folder: Path) -> None:
    """Write the Mixtral of the resolved model, and its tokenizer, into the new folder `folder`."""
    config = sparse_config(vllm_config.model_config.hf_text_config)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = dict(sparse_weights(iterate_weights(vllm_config)))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    tokenizer = get_tokenizer(vllm_config)
    if tokenizer is not None:
        _save_tokenizer(tokenizer, folder)


def _save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")
    settings: dict[str, Any] = dict(tokenizer.special_tokens_map)
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    text = json.dumps(settings, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
