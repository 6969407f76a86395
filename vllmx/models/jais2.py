# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/jais2.py @ v0.25.0
"""Jais 2: Llama with norms by mean and variance, no gate, squared relu and biases."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class Jais2DecoderLayer(LayerNormDecoderLayer):
    """Llama's layer; windows under the name that upstream reads are refused."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        if config.to_dict().get("interleaved_sliding_window") is not None:
            raise CheckpointError(
                f"{config.origin}: interleaved_sliding_window is set, which is not supported."
            )
        super().__init__(config, **shared)


class Jais2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Jais2DecoderLayer


class Jais2ForCausalLM(LlamaForCausalLM):
    """Jais 2 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(stacked=PLAIN_STACKED)
    model_cls = Jais2Model
