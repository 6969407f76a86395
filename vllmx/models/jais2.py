# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/jais2.py @ v0.25.0
"""Jais 2: Llama with norms by mean and variance, no gate, squared relu and biases."""

from __future__ import annotations

from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class Jais2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = LayerNormDecoderLayer


class Jais2ForCausalLM(LlamaForCausalLM):
    """Jais 2 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(stacked=PLAIN_STACKED)
    model_cls = Jais2Model
