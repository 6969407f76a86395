# SPDX-License-Identifier: Apache-2.0
"""The tensors of families with experts, in the letters of dense_tensors.py."""

from __future__ import annotations

from vllmx.models.hf_config import HFConfig
from vllmx.tiny.dense_tensors import (
    ENDS,
    GATED,
    HEAD_NORMS,
    NORMS,
    OUT,
    POST_NORMS,
    QKV,
    Layout,
    Named,
    named,
    with_biases,
)


def gated(prefix: str, inner: str) -> Named:
    """The three matrices of a gated MLP of `inner` elements."""
    return named(f"{inner} H", f"{prefix}.gate_proj", f"{prefix}.up_proj") | named(
        f"H {inner}", f"{prefix}.down_proj"
    )


def one_by_one(prefix: str, names: str = "gate_proj up_proj down_proj") -> Named:
    """The matrices of each expert."""
    gate, up, down = names.split()
    return named("J H", f"{prefix}.{{e}}.{gate}", f"{prefix}.{{e}}.{up}") | named(
        "H J", f"{prefix}.{{e}}.{down}"
    )


def by_kind(config: HFConfig, layer: int) -> bool:
    """Whether mlp_layer_types says "sparse"."""
    return config.mlp_layer_types[layer] == "sparse"


def behind_first(config: HFConfig, layer: int) -> bool:
    """Whether the layer lies behind the first_k_dense_replace ones."""
    return layer >= config.first_k_dense_replace


GATE = named("E H", "mlp.gate")
EACH = one_by_one("mlp.experts")
SHARED = gated("mlp.shared_experts", "S")
WHOLE_NORMS = named("Q", "self_attn.q_norm") | named("K", "self_attn.k_norm")
MIXTRAL = named("E H", "block_sparse_moe.gate") | one_by_one("block_sparse_moe.experts", "w1 w3 w2")
BAILING = named("Q+2K H", "attention.query_key_value") | named("H Q", "attention.dense") | NORMS
BAILING_ENDS = named("V H", "model.word_embeddings") | named("H", "model.norm")

SPARSE_LAYOUTS: dict[str, Layout] = {
    "afmoe": Layout(
        QKV
        | OUT
        | NORMS
        | HEAD_NORMS
        | named("Q H", "self_attn.gate_proj")
        | named("H", "pre_mlp_layernorm", "post_mlp_layernorm"),
        sparse=named("E H", "mlp.router.gate") | {"mlp.expert_bias": "E"} | EACH | SHARED,
        dense=GATED,
        is_sparse=lambda config, layer: layer >= config.num_dense_layers,
    ),
    "cohere2_moe": Layout(
        QKV | OUT | named("H", "input_layernorm"),
        sparse=GATE | EACH | gated("mlp.shared_experts", "2I"),
        dense=gated("mlp", "G"),
        is_sparse=by_kind,
    ),
    "dbrx": Layout(
        named("Q+2K H", "norm_attn_norm.attn.Wqkv")
        | named("H Q", "norm_attn_norm.attn.out_proj")
        | named("H", "norm_attn_norm.norm_1", "norm_attn_norm.norm_2")
        | named("E H", "ffn.router.layer")
        | {f"ffn.experts.mlp.{name}": "EJ H" for name in ("w1", "v1", "w2")},
        layers="transformer.blocks",
        outer=named("V H", "transformer.wte") | named("H", "transformer.norm_f"),
    ),
    "ernie4_5_moe": Layout(
        QKV | OUT | NORMS,
        sparse=GATE | {"mlp.moe_statics.e_score_correction_bias": "1 E"} | EACH | SHARED,
        dense=GATED,
        is_sparse=lambda config, layer: (
            config.moe_layer_start_index <= layer <= config.moe_layer_end_index
        ),
    ),
    "exaone_moe": Layout(
        QKV | OUT | NORMS | HEAD_NORMS,
        sparse=GATE | {"mlp.e_score_correction_bias": "E"} | EACH | SHARED,
        dense=GATED,
        is_sparse=by_kind,
    ),
    "flex_olmo": Layout(QKV | OUT | POST_NORMS | WHOLE_NORMS | GATE | EACH),
    "granitemoeshared": Layout(
        QKV
        | OUT
        | NORMS
        | named("E H", "block_sparse_moe.router.layer")
        | named("E 2J H", "block_sparse_moe.input_linear")
        | named("E H J", "block_sparse_moe.output_linear")
        | named("2S H", "shared_mlp.input_linear")
        | named("H S", "shared_mlp.output_linear")
    ),
    "hunyuan_v1_moe": Layout(
        QKV
        | OUT
        | NORMS
        | named("D", "self_attn.query_layernorm", "self_attn.key_layernorm")
        | named("E H", "mlp.gate.wg")
        | EACH
        | gated("mlp.shared_mlp", "S")
    ),
    "hy_v3": Layout(
        QKV | OUT | NORMS | HEAD_NORMS,
        sparse=named("E H", "mlp.router.gate")
        | {"mlp.expert_bias": "E"}
        | EACH
        | gated("mlp.shared_mlp", "S"),
        dense=GATED,
        is_sparse=by_kind,
    ),
    "laguna": Layout(
        QKV | OUT | NORMS | HEAD_NORMS | named("N H", "self_attn.g_proj"),
        sparse=GATE
        | {"mlp.experts.e_score_correction_bias": "E"}
        | EACH
        | gated("mlp.shared_expert", "S"),
        dense=GATED,
        is_sparse=by_kind,
    ),
    "mellum": Layout(
        QKV | OUT | NORMS | HEAD_NORMS, sparse=GATE | EACH, dense=GATED, is_sparse=by_kind
    ),
    "minimax_m2": Layout(
        QKV
        | OUT
        | NORMS
        | WHOLE_NORMS
        | MIXTRAL
        | {"block_sparse_moe.e_score_correction_bias": "E"}
    ),
    "phimoe": Layout(
        with_biases(QKV, OUT, NORMS) | MIXTRAL,
        outer=ENDS,
    ),
    "sarvam_moe": Layout(
        BAILING | named("D", "attention.query_layernorm", "attention.key_layernorm"),
        sparse=GATE | {"mlp.gate.expert_bias": "E"} | EACH | SHARED,
        dense=GATED,
        is_sparse=behind_first,
        outer=BAILING_ENDS,
    ),
    "gpt_oss": Layout(
        with_biases(QKV, OUT, named("E H", "mlp.router"))
        | NORMS
        | {
            "self_attn.sinks": "N",
            "mlp.experts.gate_up_proj": "E H 2J",
            "mlp.experts.gate_up_proj_bias": "E 2J",
            "mlp.experts.down_proj": "E J H",
            "mlp.experts.down_proj_bias": "E H",
        }
    ),
    "llama4_text": Layout(
        QKV | OUT | NORMS,
        sparse=named("E H", "feed_forward.router")
        | gated("feed_forward.shared_expert", "I")
        | {
            "feed_forward.experts.gate_up_proj": "E H 2J",
            "feed_forward.experts.down_proj": "E J H",
        },
        dense=gated("feed_forward", "G"),
        is_sparse=lambda config, layer: (layer + 1) % config.interleave_moe_layer_step == 0,
    ),
}
