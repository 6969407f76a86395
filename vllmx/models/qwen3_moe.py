# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen3_moe.py @ v0.25.0
"""Qwen3 MoE: Qwen3 with experts in its layers."""

from __future__ import annotations

from vllmx.models.llama import LlamaForCausalLM
from vllmx.models.qwen2_moe import qwen_moe_mlp
from vllmx.models.qwen3 import Qwen3DecoderLayer, Qwen3Model


class Qwen3MoeDecoderLayer(Qwen3DecoderLayer):
    """Qwen3's layer with, as the config says, experts."""

    mlp_cls = staticmethod(qwen_moe_mlp)


class Qwen3MoeModel(Qwen3Model):
    """Embedding, layers, final norm."""

    layer_cls = Qwen3MoeDecoderLayer


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 MoE with its output head."""

    model_cls = Qwen3MoeModel
