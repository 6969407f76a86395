# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/granitemoe.py @ v0.25.0
"""Granite MoE: Granite whose MLPs are experts, stored stacked."""

from __future__ import annotations

from vllmx.models.granite import GraniteDecoderLayer, GraniteForCausalLM, GraniteModel
from vllmx.models.mixtral import MixtralMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


class GraniteMoeDecoderLayer(GraniteDecoderLayer):
    """Granite's layer with Mixtral's experts."""

    mlp_cls = MixtralMoE


class GraniteMoeModel(GraniteModel):
    """Multiplied embedding, layers, final norm."""

    layer_cls = GraniteMoeDecoderLayer


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite MoE with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
            ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
            ".block_sparse_moe.router.layer.": ".mlp.gate.",
        },
    )
    model_cls = GraniteMoeModel
