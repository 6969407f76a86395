# SPDX-License-Identifier: Apache-2.0
"""The tensors of dense families, by model_type: names, and shapes in letters.

V vocabulary, H hidden size, I inner size, D size of a head, N heads, M key/value heads, Q and K all
elements of queries and of keys, P positions, E experts, J their inner size, S that of what all
tokens share, G that of layers without experts; of latent attention A and B the sizes of the latents
of queries and of keys, R the rotated part of a key, X all of a key, W a value, Y what of both comes
of the latent. What stands side by side is multiplied, `+` adds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllmx.models.hf_config import HFConfig

Named = dict[str, str]
"""Name of a tensor -> its shape in letters."""


@dataclass(frozen=True)
class Layout:
    """Where a family keeps its tensors; `layer` is what each layer has below `layers`.I.

    sparse, dense: what layers with experts have besides, and the others; `{e}` in a name stands for
    each expert.
    """

    layer: Named
    layers: str = "model.layers"
    outer: Named = field(
        default_factory=lambda: {"model.embed_tokens.weight": "V H", "model.norm.weight": "H"}
    )
    head: Named = field(default_factory=lambda: {"lm_head.weight": "V H"})
    sparse: Named = field(default_factory=dict)
    dense: Named = field(default_factory=dict)
    is_sparse: Callable[[HFConfig, int], bool] = lambda config, layer: True


def named(shape: str, *names: str) -> Named:
    """Weights of one shape."""
    return {f"{name}.weight": shape for name in names}


def biases(*groups: Named) -> Named:
    """A bias for each weight of the groups."""
    return {
        name.removesuffix("weight") + "bias": shape.split()[0]
        for group in groups
        for name, shape in group.items()
    }


def with_biases(*groups: Named) -> Named:
    """The groups and their biases."""
    return {name: shape for group in groups for name, shape in group.items()} | biases(*groups)


QKV = named("Q H", "self_attn.q_proj") | named("K H", "self_attn.k_proj", "self_attn.v_proj")
OUT = named("H Q", "self_attn.o_proj")
GATED = named("I H", "mlp.gate_proj", "mlp.up_proj") | named("H I", "mlp.down_proj")
PLAIN = named("I H", "mlp.up_proj") | named("H I", "mlp.down_proj")
NORMS = named("H", "input_layernorm", "post_attention_layernorm")
SANDWICH = NORMS | named("H", "pre_feedforward_layernorm", "post_feedforward_layernorm")
LLAMA = QKV | OUT | GATED | NORMS

TRANSFORMER = "transformer.h"
FUSED_GATED = named("2I H", "mlp.gate_up_proj") | named("H I", "mlp.down_proj")
HEAD_NORMS = named("D", "self_attn.q_norm", "self_attn.k_norm")
NEOX_MLP = named("I H", "mlp.dense_h_to_4h") | named("H I", "mlp.dense_4h_to_h")
POST_NORMS = named("H", "post_attention_layernorm", "post_feedforward_layernorm")
EMBED = named("V H", "model.embed_tokens")
ENDS = EMBED | with_biases(named("H", "model.norm"))
"""Embedding and a final norm with bias."""

LAYOUTS: dict[str, Layout] = {
    "apertus": Layout(
        QKV
        | OUT
        | PLAIN
        | HEAD_NORMS
        | named("H", "attention_layernorm", "feedforward_layernorm")
        | {f"mlp.act_fn.{name}": "1" for name in ("alpha_p", "alpha_n")}
        | {f"mlp.act_fn.{name}": "" for name in ("beta", "eps")}
    ),
    "arcee": Layout(QKV | OUT | PLAIN | NORMS),
    "bloom": Layout(
        with_biases(
            NORMS,
            named("3H H", "self_attention.query_key_value"),
            named("H H", "self_attention.dense"),
            NEOX_MLP,
        ),
        layers=TRANSFORMER,
        outer=named("V H", "transformer.word_embeddings")
        | with_biases(named("H", "transformer.word_embeddings_layernorm", "transformer.ln_f")),
    ),
    "cohere": Layout(
        QKV
        | OUT
        | GATED
        | named("H", "input_layernorm")
        | named("N D", "self_attn.q_norm")
        | named("M D", "self_attn.k_norm")
    ),
    "cohere2": Layout(QKV | OUT | GATED | named("H", "input_layernorm")),
    "cwm": Layout(LLAMA),
    "ernie4_5": Layout(LLAMA),
    "exaone4": Layout(QKV | OUT | GATED | HEAD_NORMS | POST_NORMS),
    "exaone": Layout(
        named("Q H", "attn.attention.q_proj")
        | named("K H", "attn.attention.k_proj", "attn.attention.v_proj")
        | named("H Q", "attn.attention.out_proj")
        | named("I H", "mlp.c_fc_0", "mlp.c_fc_1")
        | named("H I", "mlp.c_proj")
        | named("H", "ln_1", "ln_2"),
        layers=TRANSFORMER,
        outer=named("V H", "transformer.wte") | named("H", "transformer.ln_f"),
    ),
    "falcon": Layout(
        named("Q+2K H", "self_attention.query_key_value")
        | named("H Q", "self_attention.dense")
        | NEOX_MLP
        | with_biases(named("H", "ln_attn", "ln_mlp")),
        layers=TRANSFORMER,
        outer=named("V H", "transformer.word_embeddings")
        | with_biases(named("H", "transformer.ln_f")),
    ),
    "glm": Layout(QKV | biases(QKV) | OUT | FUSED_GATED | NORMS),
    "glm4": Layout(
        QKV
        | biases(QKV)
        | OUT
        | FUSED_GATED
        | NORMS
        | named("H", "post_self_attn_layernorm", "post_mlp_layernorm")
    ),
    "gpt2": Layout(
        with_biases(named("H", "ln_1", "ln_2"))
        | named("H 3H", "attn.c_attn")
        | named("H H", "attn.c_proj")
        | named("H I", "mlp.c_fc")
        | named("I H", "mlp.c_proj")
        | {"attn.c_attn.bias": "3H", "attn.c_proj.bias": "H"}
        | {"mlp.c_fc.bias": "I", "mlp.c_proj.bias": "H"},
        layers=TRANSFORMER,
        outer=named("V H", "transformer.wte")
        | named("P H", "transformer.wpe")
        | with_biases(named("H", "transformer.ln_f")),
    ),
    "gpt_bigcode": Layout(
        with_biases(
            named("H", "ln_1", "ln_2"),
            named("Q+2K H", "attn.c_attn"),
            named("H H", "attn.c_proj"),
            named("I H", "mlp.c_fc"),
            named("H I", "mlp.c_proj"),
        ),
        layers=TRANSFORMER,
        outer=named("V H", "transformer.wte")
        | named("P H", "transformer.wpe")
        | with_biases(named("H", "transformer.ln_f")),
    ),
    "gpt_neox": Layout(
        with_biases(
            NORMS,
            named("3H H", "attention.query_key_value"),
            named("H H", "attention.dense"),
            NEOX_MLP,
        ),
        layers="gpt_neox.layers",
        outer=named("V H", "gpt_neox.embed_in")
        | with_biases(named("H", "gpt_neox.final_layer_norm")),
        head=named("V H", "embed_out"),
    ),
    "gptj": Layout(
        named("H H", "attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.out_proj")
        | with_biases(named("H", "ln_1"), named("I H", "mlp.fc_in"), named("H I", "mlp.fc_out")),
        layers=TRANSFORMER,
        outer=named("V H", "transformer.wte") | with_biases(named("H", "transformer.ln_f")),
        head=with_biases(named("V H", "lm_head")),
    ),
    "granite": Layout(LLAMA),
    "hunyuan_v1_dense": Layout(
        LLAMA | named("D", "self_attn.query_layernorm", "self_attn.key_layernorm")
    ),
    "hyperclovax": Layout(LLAMA | named("H", "post_norm1", "post_norm2")),
    "internlm3": Layout(with_biases(QKV, OUT, GATED) | NORMS),
    "iquestcoder": Layout(LLAMA),
    "jais2": Layout(with_biases(QKV, OUT, PLAIN, NORMS), outer=ENDS),
    "mpt": Layout(
        named("H", "norm_1", "norm_2")
        | named("3H H", "attn.Wqkv")
        | named("H H", "attn.out_proj")
        | named("I H", "ffn.up_proj")
        | named("H I", "ffn.down_proj"),
        layers="transformer.blocks",
        outer=named("V H", "transformer.wte") | named("H", "transformer.norm_f"),
    ),
    "nemotron": Layout(QKV | OUT | PLAIN | with_biases(NORMS), outer=ENDS),
    "olmo": Layout(QKV | OUT | GATED, outer=EMBED),
    "olmo2": Layout(
        QKV
        | OUT
        | GATED
        | POST_NORMS
        | named("Q", "self_attn.q_norm")
        | named("K", "self_attn.k_norm")
    ),
    "opt": Layout(
        with_biases(
            QKV,
            named("H H", "self_attn.out_proj"),
            named("I H", "fc1"),
            named("H I", "fc2"),
            named("H", "self_attn_layer_norm", "final_layer_norm"),
        ),
        layers="model.decoder.layers",
        outer=named("V H", "model.decoder.embed_tokens")
        | named("P+2 H", "model.decoder.embed_positions")
        | with_biases(named("H", "model.decoder.final_layer_norm")),
    ),
    "persimmon": Layout(
        with_biases(
            named("3H H", "self_attn.query_key_value"),
            named("H H", "self_attn.dense"),
            named("D", "self_attn.q_layernorm", "self_attn.k_layernorm"),
            NEOX_MLP,
            NORMS,
        ),
        outer=EMBED | with_biases(named("H", "model.final_layernorm")),
    ),
    "seed_oss": Layout(LLAMA | biases(QKV)),
    "stablelm": Layout(QKV | biases(QKV) | OUT | GATED | with_biases(NORMS), outer=ENDS),
    "gemma": Layout(LLAMA),
    "gemma2": Layout(QKV | OUT | GATED | SANDWICH),
    "ministral3": Layout(LLAMA),
    "mistral": Layout(LLAMA),
    "smollm3": Layout(LLAMA),
    "starcoder2": Layout(
        with_biases(QKV, OUT, named("I H", "mlp.c_fc"), named("H I", "mlp.c_proj"), NORMS),
        outer=ENDS,
    ),
    "phi": Layout(
        with_biases(
            QKV,
            named("H Q", "self_attn.dense"),
            named("I H", "mlp.fc1"),
            named("H I", "mlp.fc2"),
            named("H", "input_layernorm"),
        ),
        outer=named("V H", "model.embed_tokens") | with_biases(named("H", "model.final_layernorm")),
        head=with_biases(named("V H", "lm_head")),
    ),
    "phi3": Layout(
        named("Q+2K H", "self_attn.qkv_proj")
        | OUT
        | named("2I H", "mlp.gate_up_proj")
        | named("H I", "mlp.down_proj")
        | NORMS
    ),
    "qwen2": Layout(LLAMA | biases(QKV)),
}


SHARED = ("num_shared_experts", "moe_num_shared_experts", "num_shared_expert", "n_shared_experts")
DENSE_SIZES = ("intermediate_size_mlp", "prefix_dense_intermediate_size")
COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def shapes_of(layout: Layout, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a checkpoint with this config."""
    read = HFConfig(config)
    heads, kv_heads, head = read.num_attention_heads, read.num_key_value_heads, read.head_dim
    sizes = {
        "V": read.vocab_size,
        "H": read.hidden_size,
        "I": read.read("intermediate_size", int, 4 * read.hidden_size),
        "D": head,
        "N": heads,
        "M": kv_heads,
        "Q": heads * head,
        "K": kv_heads * head,
        "P": read.max_position_embeddings,
        "E": next((read.read(key, int) for key in COUNTS if key in read), 0),
        "J": read.read("moe_intermediate_size", int, read.read("intermediate_size", int, 0)),
        "S": shared_size(read),
        **latent_sizes(read),
        "G": next((read.read(key, int) for key in DENSE_SIZES if key in read), 0),
    }

    def size(text: str) -> int:
        parts = [re.fullmatch(r"(\d*)([A-Z]*)", part) for part in text.split("+")]
        return sum(
            math.prod([int(part[1] or 1), *(sizes[letter] for letter in part[2])])
            for part in parts
            if part
        )

    def shaped(group: Named) -> dict[str, tuple[int, ...]]:
        return {name: tuple(map(size, shape.split())) for name, shape in group.items()}

    found = shaped(layout.outer)
    own_heads = read.read("num_attention_heads_per_layer", (list, type(None)), None)
    for i in range(read.num_hidden_layers):
        if own_heads is not None:
            sizes |= {"N": own_heads[i], "Q": own_heads[i] * head}
        kind = layout.sparse if layout.is_sparse(read, i) else layout.dense
        for name, shape in (layout.layer | kind).items():
            names = [name.replace("{e}", str(e)) for e in range(sizes["E"] if "{e}" in name else 1)]
            found |= shaped({f"{layout.layers}.{i}.{each}": shape for each in names})
    if not read.tie_word_embeddings:
        found |= shaped(layout.head)
    return found


def latent_sizes(config: HFConfig) -> dict[str, int]:
    """The letters of latent attention; 0 where there is none."""
    names = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    q_rank, kv_rank, rope, nope, value = (
        config.read(name, (int, type(None)), None) or 0 for name in names
    )
    return {
        "A": q_rank,
        "B": kv_rank,
        "R": rope,
        "W": value,
        "X": nope + rope,
        "Y": nope + value,
    }


def shared_size(config: HFConfig) -> int:
    """Inner size of the experts that every token takes; 0 where there are none."""
    inner = config.read("moe_intermediate_size", int, 0)
    count = next((config.read(key, int) for key in SHARED if key in config), 1)
    sizes = ("shared_intermediate_size", "shared_expert_intermediate_size")
    return next((config.read(key, int) for key in sizes if key in config.raw), inner * count)


LAYOUTS["olmo3"] = LAYOUTS["olmo2"]
