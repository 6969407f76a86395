# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/telechat2.py @ v0.25.0
"""TeleChat 1 and 2: Llama whose keys and values come stacked head by head, and biases behind."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from vllmx.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from vllmx.models.utils import WeightsMapper


class TeleChat2Attention(LlamaAttention):
    """A bias after attention, none before."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Of the output alone."""
        return False, True


class TeleChat2MLP(LlamaMLP):
    """A bias after the gate, none before."""

    def __init__(self, config: HFConfig, *, prefix: str, **shared: Any) -> None:
        super().__init__(config, prefix=prefix, **shared)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **shared
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, True, prefix=f"{prefix}.down_proj", **shared
        )


class TeleChat2DecoderLayer(LlamaDecoderLayer):
    """Llama's layer with TeleChat's parts."""

    attention_cls = TeleChat2Attention
    mlp_cls: type[nn.Module] = TeleChat2MLP


class TeleChat2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = TeleChat2DecoderLayer


class TeleChat2ForCausalLM(LlamaForCausalLM):
    """TeleChat 2 with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked={
            ".query.": (".qkv_proj.", "q"),
            ".key.": (".qkv_proj.", "k"),
            ".value.": (".qkv_proj.", "v"),
            ".gate_proj.": (".gate_up_proj.", "0"),
            ".up_proj.": (".gate_up_proj.", "1"),
        },
        renamed={
            "transformer.word_embeddings.": "model.embed_tokens.",
            "transformer.ln_f.": "model.norm.",
            "transformer.h.": "model.layers.",
            ".self_attention.dense.": ".self_attn.o_proj.",
            ".self_attention.": ".self_attn.",
        },
        apart={".key.": ".key_value.", ".value.": ".key_value."},
    )
    model_cls = TeleChat2Model

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load a checkpoint's (name, tensor) pairs; CheckpointError where they don't fit."""
        super().load_weights(_apart(weights, self.config.head_dim))


class TeleChatForCausalLM(TeleChat2ForCausalLM):
    """TeleChat, which upstream serves with the same class."""


def _apart(weights: Iterable[tuple[str, Any]], head_dim: int) -> Iterator[tuple[str, Any]]:
    """The weights, with the keys and the values of a layer as two matrices."""
    for name, weight in weights:
        if ".key_value." not in name or not isinstance(weight, Tensor) or weight.dim() != 2:
            yield name, weight
            continue
        rows = weight.unflatten(0, (-1, 2, head_dim))
        yield name.replace(".key_value.", ".key."), rows[:, 0].flatten(0, 1)
        yield name.replace(".key_value.", ".value."), rows[:, 1].flatten(0, 1)
