# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gemma.py @ v0.25.0
"""Gemma: Llama with norms stored less one, a scaled embedding and gelu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import GemmaRMSNorm
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel


def activation_of(config: HFConfig) -> str:
    """hidden_activation. Configs may have the older hidden_act beside it or in its place, where the
    "gelu" of the first Gemma was a slip; CheckpointError where the two are two functions."""
    said = config.read("hidden_activation", (str, type(None)), None) or "gelu_pytorch_tanh"
    older = config.read("hidden_act", (str, type(None)), None)
    if older not in (None, "gelu", said):
        raise CheckpointError(
            f"{config.origin}: hidden_act is {older!r} and hidden_activation {said!r}: say the "
            "same in both, or leave hidden_act out."
        )
    return said


class GemmaMLP(LlamaMLP):
    """down(gelu(gate(x)) * up(x))."""

    activation_of = staticmethod(activation_of)


class GemmaDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with Gemma's norms and MLP."""

    mlp_cls = GemmaMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """Its factor is 1 + weight."""
        return GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, ops)


class GemmaModel(LlamaModel):
    """Scaled embedding, layers, final norm."""

    layer_cls: type[Any] = GemmaDecoderLayer

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Rows of the table times the root of their length."""
        return self.embed_tokens(input_ids) * self.config.hidden_size**0.5


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma with its (tied) output head."""

    model_cls = GemmaModel
