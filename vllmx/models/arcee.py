# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/arcee.py @ v0.25.0
"""Arcee: Llama whose MLP has no gate and a squared relu."""

from __future__ import annotations

from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllmx.models.nemotron import NemotronMLP
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class ArceeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around another MLP."""

    mlp_cls = NemotronMLP


class ArceeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = ArceeDecoderLayer


class ArceeForCausalLM(LlamaForCausalLM):
    """Arcee with its output head."""

    hf_to_vllm_mapper = WeightsMapper(stacked=PLAIN_STACKED)
    model_cls = ArceeModel
