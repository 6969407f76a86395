# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/openpangu.py @ v0.25.0
"""openPangu Embedded: Llama with biases around its attention."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

OTHERS = (
    "interleaved_sliding_window",
    "kv_lora_rank",
    "n_routed_experts",
    "param_sink_number",
    "sandwich_norm",
)
"""What other models of the name have, each by a key of its own."""


class PanguEmbeddedAttention(LlamaAttention):
    """Llama's; qkv_bias, where it is there, is of queries, keys and values."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """attention_bias, on both sides unless qkv_bias says otherwise of the first."""
        bias = config.read("attention_bias", bool)
        return config.read("qkv_bias", bool, bias), bias


class PanguEmbeddedDecoderLayer(LlamaDecoderLayer):
    """Llama's layer; what the larger models of the family have is refused."""

    attention_cls = PanguEmbeddedAttention

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in OTHERS:
            if key in config and getattr(config, key):
                raise CheckpointError(f"{config.origin}: {key} is set, which is not supported.")
        if not config.read("is_causal", bool, True):
            raise CheckpointError(f"{config.origin}: is_causal=False is not supported.")
        if config.rope_parameters.get("mrope_interleaved"):
            raise CheckpointError(f"{config.origin}: mrope_interleaved is not supported.")
        super().__init__(config, **shared)


class PanguEmbeddedModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = PanguEmbeddedDecoderLayer


class PanguEmbeddedForCausalLM(LlamaForCausalLM):
    """openPangu Embedded with its output head."""

    model_cls = PanguEmbeddedModel
