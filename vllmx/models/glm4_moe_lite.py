# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/glm4_moe_lite.py @ v0.25.0
"""GLM-4.7 Flash: DeepSeek V3 with GLM-4's experts."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.deepseek_v2 import (
    DeepseekV2DecoderLayer,
    DeepseekV2Model,
    DeepseekV3ForCausalLM,
)
from vllmx.models.glm4_moe import Glm4MoE
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP
from vllmx.models.utils import layer_index


def glm4_lite_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first layers, or where mlp_layer_types says "dense"; else experts."""
    layer = layer_index(prefix)
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    first = config.read("first_k_dense_replace", int, 1)
    dense = layer < first if kinds is None else kinds[layer] == "dense"
    for key, built in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
        if (told := config.read(key, (str, type(None)), None)) not in (None, built):
            raise CheckpointError(f"{config.origin}: {key}={told!r} is not supported; {built} is.")
    return (LlamaMLP if dense else Glm4MoE)(config, prefix=prefix, **shared)


class Glm4MoeLiteDecoderLayer(DeepseekV2DecoderLayer):
    """DeepSeek's layer around GLM-4's experts."""

    mlp_cls = staticmethod(glm4_lite_mlp)


class Glm4MoeLiteModel(DeepseekV2Model):
    """Embedding, layers, final norm."""

    layer_cls = Glm4MoeLiteDecoderLayer


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7 Flash with its output head."""

    model_cls = Glm4MoeLiteModel
