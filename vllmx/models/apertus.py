# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/apertus.py @ v0.25.0
"""Apertus: Qwen3's attention, an MLP without gate, and an activation with weights."""

from __future__ import annotations

from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.nemotron import NemotronMLP
from vllmx.models.qwen3 import Qwen3DecoderLayer
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class ApertusDecoderLayer(Qwen3DecoderLayer):
    """Normed queries and keys, no gate."""

    mlp_cls = NemotronMLP


class ApertusModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = ApertusDecoderLayer


class ApertusForCausalLM(LlamaForCausalLM):
    """Apertus with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={
            ".attention_layernorm.": ".input_layernorm.",
            ".feedforward_layernorm.": ".post_attention_layernorm.",
        },
    )
    model_cls = ApertusModel
