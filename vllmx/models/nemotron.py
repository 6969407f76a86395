# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/nemotron.py @ v0.25.0
"""Nemotron: Llama without a gate, norms stored less one, squared relu."""

from __future__ import annotations

from typing import Any

from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import LayerNorm
from vllmx.models.dense import LayerNormDecoderLayer, PlainMLP
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class NemotronMLP(PlainMLP):
    """No gate, and no bias unless the config says so."""

    has_bias = False


class NemotronDecoderLayer(LayerNormDecoderLayer):
    """Llama's order."""

    mlp_cls = NemotronMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """Its factor is 1 + weight."""
        return LayerNorm(config.hidden_size, config.layer_norm_eps, ops, less_one=True)


class NemotronModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = NemotronDecoderLayer


class NemotronForCausalLM(LlamaForCausalLM):
    """Nemotron with its output head."""

    hf_to_vllm_mapper = WeightsMapper(stacked=PLAIN_STACKED)
    model_cls = NemotronModel
