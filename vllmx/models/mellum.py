# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mellum.py @ v0.25.0
"""Mellum: Qwen3 MoE with windows, and a rotation for each kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaMLP, LlamaModel
from vllmx.models.qwen3 import Qwen3DecoderLayer
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, layer_index


def mellum_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts, or one MLP where mlp_layer_types says "dense"."""
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    if kinds is not None and kinds[layer_index(prefix)] == "dense":
        return LlamaMLP(config, prefix=prefix, **shared)
    return SharedExpertsMoE(
        config,
        config.read("num_experts", int),
        config.read("num_experts_per_tok", int),
        config.read("moe_intermediate_size", int),
        prefix=prefix,
        renormalize=config.read("norm_topk_prob", bool),
        **shared,
    )


class MellumDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's layer with experts."""

    mlp_cls = staticmethod(mellum_mlp)


class MellumModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = MellumDecoderLayer


class MellumForCausalLM(LlamaForCausalLM):
    """Mellum with its output head; a head for drafting is left out, as in transformers."""

    hf_to_vllm_mapper = replace(LLAMA_MAPPER, skip_starts=("mtp.",))
    model_cls = MellumModel
