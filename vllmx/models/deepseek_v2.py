# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/deepseek_v2.py @ v0.25.0
"""DeepSeek V2 and V3: keys and values of latents, experts in groups, some that all tokens share.

Layers for drafting, which a checkpoint has behind the model's own, are left out.
"""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.deepseek import deepseek_mlp
from vllmx.models.glm4_moe import Glm4MoeForCausalLM
from vllmx.models.hf_config import HFConfig
from vllmx.models.latent import LATENT_MAPPER, ScaledLatentAttention
from vllmx.models.llama import LlamaDecoderLayer, LlamaModel


class DeepseekV2DecoderLayer(LlamaDecoderLayer):
    """Llama's order; a choice of keys, and halves that are rotated, are refused."""

    attention_cls = ScaledLatentAttention
    mlp_cls = staticmethod(deepseek_mlp)

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in ("index_topk", "rswa_window"):
            if config.read(key, (int, type(None)), None):
                raise CheckpointError(f"{config.origin}: {key} is set, which is not supported.")
        if not config.read("rope_interleave", bool, True):
            raise CheckpointError(f"{config.origin}: rope_interleave=False is not supported.")
        super().__init__(config, **shared)


class DeepseekV2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = DeepseekV2DecoderLayer


class DeepseekV2ForCausalLM(Glm4MoeForCausalLM):
    """DeepSeek V2 with its output head."""

    hf_to_vllm_mapper = LATENT_MAPPER
    model_cls = DeepseekV2Model


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek V3 and R1, and Kimi K2."""
