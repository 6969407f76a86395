# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/exaone_moe.py @ v0.25.0
"""EXAONE MoE: EXAONE 4's attention in Llama's order, and GLM-4 MoE's experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.layers.fused_moe import check_groups
from vllmx.models.exaone4 import Exaone4Attention
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index


def exaone_moe_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first first_k_dense_replace layers, or where mlp_layer_types says so."""
    layer = layer_index(prefix)
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    dense = layer < config.first_k_dense_replace if kinds is None else kinds[layer] == "dense"
    if dense:
        return LlamaMLP(config, prefix=prefix, **shared)
    experts, inner = config.read("num_experts", int), config.read("moe_intermediate_size", int)
    groups, kept = config.read("n_group", int), config.read("topk_group", int)
    check_groups(groups, kept, experts, config.origin)
    return SharedExpertsMoE(
        config,
        experts,
        config.read("num_experts_per_tok", int),
        inner,
        inner * config.read("num_shared_experts", int),
        prefix=prefix,
        correction_bias=True,
        renormalize=config.read("norm_topk_prob", bool),
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        scoring_func="sigmoid",
        routed_scaling_factor=config.read("routed_scaling_factor", float),
        **shared,
    )


class ExaoneMoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around EXAONE 4's attention and experts."""

    attention_cls = Exaone4Attention
    mlp_cls = staticmethod(exaone_moe_mlp)


class ExaoneMoeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = ExaoneMoeDecoderLayer


class ExaoneMoEForCausalLM(LlamaForCausalLM):
    """EXAONE MoE with its output head; a head for drafting is left out."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        skip_starts=("mtp.",),
        renamed={".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"},
    )
    model_cls = ExaoneMoeModel
