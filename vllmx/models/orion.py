# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/orion.py @ v0.25.0
"""Orion: Llama with norms by mean and variance."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import LayerNorm
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaMLP, LlamaModel


class OrionDecoderLayer(LayerNormDecoderLayer):
    """Llama's order with a gated MLP."""

    mlp_cls: type[nn.Module] = LlamaMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """With weight and bias; the config calls its epsilon rms_norm_eps."""
        return LayerNorm(config.hidden_size, config.rms_norm_eps, ops)


class OrionModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = OrionDecoderLayer


class OrionForCausalLM(LlamaForCausalLM):
    """Orion with its output head."""

    model_cls = OrionModel
