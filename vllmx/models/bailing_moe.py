# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/bailing_moe.py @ v0.25.0
"""Bailing (Ling and Ring): stacked projections, experts by softmax or by sigmoid, shared ones.

The second generation has normed queries and keys, heads that are rotated in part, and a bias for
the choice. Layers for drafting, behind the model's own, are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.glm4_moe import Glm4MoeForCausalLM
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.sparse import SharedExpertsMoE, groups_of
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index

ROUTERS = {"softmax": False, "sigmoid": True}
"""score_function -> moe_router_enable_expert_bias: what goes together."""


class BailingAttention(LlamaAttention):
    """Llama's, rotated in part where the config says so."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """use_bias is of all matrices, use_qkv_bias of those before attention."""
        every = config.read("use_bias", bool, False)
        return every or config.read("use_qkv_bias", bool, False), every

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Over the first rotary_dim elements of a head, or the part that partial_rotary_factor
        names."""
        rope = dict(config.rope_parameters)
        if dim := config.read("rotary_dim", (int, type(None)), None):
            rope["rope_dim"] = dim
        return rope


class BailingNormedAttention(Qwen3Attention):
    """The same with normed queries and keys."""

    biases = BailingAttention.biases
    rope_parameters_of = BailingAttention.rope_parameters_of


def bailing_attention(config: HFConfig, **shared: Any) -> nn.Module:
    """Attention as use_qk_norm has it; norms by mean and variance are refused."""
    if not config.read("use_qk_norm", bool, False):
        return BailingAttention(config, **shared)
    if not config.read("use_rmsnorm", bool, True):
        raise CheckpointError(
            f"{config.origin}: use_qk_norm with use_rmsnorm=False is not supported."
        )
    return BailingNormedAttention(config, **shared)


def router_of(config: HFConfig, experts: int) -> dict[str, Any]:
    """How experts are chosen and weighed: arguments of SharedExpertsMoE."""
    scoring = config.read("score_function", (str, type(None)), None) or "softmax"
    bias = config.read("moe_router_enable_expert_bias", bool, False)
    if ROUTERS.get(scoring) is not bias:
        raise CheckpointError(
            f"{config.origin}: score_function is {scoring!r} and moe_router_enable_expert_bias "
            f"{bias}; softmax without and sigmoid with a bias are served only."
        )
    groups, kept = groups_of(config, experts)
    return {
        "float_gate": config.read("router_dtype", (str, type(None)), None) == "fp32",
        "correction_bias": bias,
        "renormalize": config.read("norm_topk_prob", bool),
        "use_grouped_topk": True,
        "num_expert_group": groups,
        "topk_group": kept,
        "scoring_func": scoring,
        "routed_scaling_factor": config.read("routed_scaling_factor", float, 1.0),
    }


def size_of_shared(config: HFConfig) -> int:
    """Inner size of all shared experts together: that of one, which the config may name, times
    their number."""
    inner = config.read("moe_intermediate_size", int)
    each = config.read("moe_shared_expert_intermediate_size", (int, type(None)), None) or inner
    return each * config.read("num_shared_experts", int)


def bailing_mlp(
    config: HFConfig,
    *,
    prefix: str,
    shared_size: Callable[[HFConfig], int] = size_of_shared,
    **shared: Any,
) -> nn.Module:
    """One MLP in the first first_k_dense_replace layers, then experts."""
    if layer_index(prefix) < config.read("first_k_dense_replace", int):
        return LlamaMLP(config, prefix=prefix, **shared)
    experts = config.read("num_experts", int)
    return SharedExpertsMoE(
        config,
        experts,
        config.read("num_experts_per_tok", int),
        config.read("moe_intermediate_size", int),
        shared_size(config),
        prefix=prefix,
        **router_of(config, experts),
        **shared,
    )


class BailingMoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Bailing's attention and experts."""

    attention_cls = staticmethod(bailing_attention)
    mlp_cls = staticmethod(bailing_mlp)

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in ("norm_head", "norm_softmax"):
            if config.read(key, bool, False):
                raise CheckpointError(f"{config.origin}: {key}=True is not supported.")
        super().__init__(config, **shared)


class BailingMoeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = BailingMoeDecoderLayer


class BailingMoeForCausalLM(Glm4MoeForCausalLM):
    """Bailing with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            "model.word_embeddings.": "model.embed_tokens.",
            ".attention.query_key_value.": ".self_attn.qkv_proj.",
            ".attention.dense.": ".self_attn.o_proj.",
            ".attention.query_layernorm.": ".self_attn.q_norm.",
            ".attention.key_layernorm.": ".self_attn.k_norm.",
            ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
        },
    )
    model_cls = BailingMoeModel


class BailingMoeV2ForCausalLM(BailingMoeForCausalLM):
    """The second generation."""
