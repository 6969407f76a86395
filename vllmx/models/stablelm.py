# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/stablelm.py @ v0.25.0
"""StableLM: Llama with norms by mean and variance and heads partly rotated."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel


class StablelmAttention(LlamaAttention):
    """Llama's; biases before it where the config says so."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """use_qkv_bias, and none after."""
        return config.use_qkv_bias, False


class StablelmDecoderLayer(LayerNormDecoderLayer):
    """Llama's order; what upstream doesn't compute either is refused."""

    attention_cls = StablelmAttention
    mlp_cls: type[nn.Module] = LlamaMLP

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in ("use_parallel_residual", "qk_layernorm"):
            if config.read(key, bool, False):
                raise CheckpointError(f"{config.origin}: {key} is not supported in StableLM.")
        super().__init__(config, **shared)


class StableLMEpochModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = StablelmDecoderLayer


class StableLmForCausalLM(LlamaForCausalLM):
    """StableLM with its output head."""

    model_cls = StableLMEpochModel


class StableLMEpochForCausalLM(StableLmForCausalLM):
    """The name that the first checkpoints have."""
