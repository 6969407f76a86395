# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/granitemoeshared.py @ v0.25.0
"""Granite MoE with one more MLP, which every token takes."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.models.granite import GraniteDecoderLayer, GraniteForCausalLM, GraniteModel
from vllmx.models.granitemoe import GraniteMoeForCausalLM
from vllmx.models.hf_config import HFConfig
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


def granite_shared_mlp(config: HFConfig, **shared: Any) -> nn.Module:
    """Experts, and an MLP of shared_intermediate_size elements, if any."""
    return SharedExpertsMoE(
        config,
        config.read("num_local_experts", int),
        config.read("num_experts_per_tok", int),
        config.intermediate_size,
        config.read("shared_intermediate_size", int),
        **shared,
    )


class GraniteMoeSharedDecoderLayer(GraniteDecoderLayer):
    """Granite's layer with experts and a shared MLP."""

    mlp_cls = staticmethod(granite_shared_mlp)


class GraniteMoeSharedModel(GraniteModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = GraniteMoeSharedDecoderLayer


class GraniteMoeSharedForCausalLM(GraniteForCausalLM):
    """Granite MoE, shared, with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            **GraniteMoeForCausalLM.hf_to_vllm_mapper.renamed,
            ".shared_mlp.input_linear.": ".mlp.shared_experts.gate_up_proj.",
            ".shared_mlp.output_linear.": ".mlp.shared_experts.down_proj.",
        },
    )
    model_cls = GraniteMoeSharedModel
