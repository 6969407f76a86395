# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/deepseek_v2.py @ v0.25.0
"""DeepSeek, the first one: Llama's attention, experts by softmax, some that all tokens share."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllmx.models.sparse import SharedExpertsMoE, groups_of
from vllmx.models.utils import layer_index


def deepseek_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first layers and between those of moe_layer_freq, or where mlp_layer_types
    says so; else experts."""
    layer, experts = layer_index(prefix), config.read("n_routed_experts", (int, type(None)), None)
    first = config.read("first_k_dense_replace", int, 0)
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    every = config.read("moe_layer_freq", int, 1)
    if every < 1:
        raise CheckpointError(f"{config.origin}: moe_layer_freq is {every}, it must be positive.")
    dense = layer < first or bool(layer % every)
    if experts is None or (dense if kinds is None else kinds[layer] == "dense"):
        return LlamaMLP(config, prefix=prefix, **shared)
    inner = config.read("moe_intermediate_size", int)
    groups, kept = groups_of(config, experts)
    return SharedExpertsMoE(
        config,
        experts,
        config.read("num_experts_per_tok", int),
        inner,
        inner * (config.read("n_shared_experts", (int, type(None)), None) or 0),
        prefix=prefix,
        correction_bias=config.read("topk_method", str, "greedy") == "noaux_tc",
        renormalize=config.read("norm_topk_prob", bool, False),
        use_grouped_topk=True,
        num_expert_group=groups,
        topk_group=kept,
        scoring_func=config.read("scoring_func", str, "softmax"),
        routed_scaling_factor=config.read("routed_scaling_factor", float, 1.0),
        **shared,
    )


class DeepseekDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with experts; latent attention is refused."""

    mlp_cls = staticmethod(deepseek_mlp)

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "rswa_window"):
            if config.read(key, (int, type(None)), None):
                raise CheckpointError(f"{config.origin}: {key} is set, which is not supported.")
        super().__init__(config, **shared)


class DeepseekModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = DeepseekDecoderLayer


class DeepseekForCausalLM(LlamaForCausalLM):
    """DeepSeek with its output head."""

    model_cls = DeepseekModel
