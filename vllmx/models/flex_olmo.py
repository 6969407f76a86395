# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/flex_olmo.py @ v0.25.0
"""FlexOlmo: OLMo 2 with OLMoE's experts."""

from __future__ import annotations

from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.olmo2 import Olmo2DecoderLayer
from vllmx.models.olmoe import OlmoeMoE


class FlexOlmoDecoderLayer(Olmo2DecoderLayer):
    """Attention and experts, each normed after."""

    mlp_cls = OlmoeMoE


class FlexOlmoModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = FlexOlmoDecoderLayer


class FlexOlmoForCausalLM(LlamaForCausalLM):
    """FlexOlmo with its output head."""

    model_cls = FlexOlmoModel
