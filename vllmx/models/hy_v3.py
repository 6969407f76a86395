# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/hy_v3.py @ v0.25.0
"""HunYuan 3: Qwen3's attention, experts by sigmoid with a bias for the choice, one that all share.

Layers for drafting, which a checkpoint has behind the model's own, are left out.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.glm4_moe import Glm4MoeForCausalLM
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index

SERVED = ("moe_router_enable_expert_bias", "moe_router_use_sigmoid")


def hy_v3_attention(config: HFConfig, **shared: Any) -> nn.Module:
    """Queries and keys are normed as qk_norm has it."""
    normed = config.read("qk_norm", bool)
    return (Qwen3Attention if normed else LlamaAttention)(config, **shared)


def hy_v3_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first first_k_dense_replace layers, or where mlp_layer_types says so."""
    layer = layer_index(prefix)
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    first = config.read("first_k_dense_replace", int, 1)
    if layer < first if kinds is None else kinds[layer] == "dense":
        return LlamaMLP(config, prefix=prefix, **shared)
    for key in SERVED:
        if not config.read(key, bool, True):
            raise CheckpointError(f"{config.origin}: {key}=False is not supported.")
    inner = config.read("moe_intermediate_size", int)
    scale = config.read("router_scaling_factor", (float, type(None)))
    return SharedExpertsMoE(
        config,
        config.read("num_experts", int),
        config.read("num_experts_per_tok", int),
        inner,
        inner * config.read("num_shared_experts", int),
        prefix=prefix,
        correction_bias=True,
        renormalize=config.read("route_norm", bool),
        scoring_func="sigmoid",
        routed_scaling_factor=1.0 if scale is None else scale,
        **shared,
    )


class HYV3DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with experts."""

    attention_cls = staticmethod(hy_v3_attention)
    mlp_cls = staticmethod(hy_v3_mlp)


class HYV3Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = HYV3DecoderLayer


class HYV3ForCausalLM(Glm4MoeForCausalLM):
    """HunYuan 3 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            ".mlp.router.gate.": ".mlp.gate.",
            ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.shared_mlp.": ".mlp.shared_experts.",
        },
    )
    model_cls = HYV3Model
