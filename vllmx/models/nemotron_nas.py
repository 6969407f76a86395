# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/nemotron_nas.py @ v0.25.0
"""DeciLM and Nemotron Super and Ultra: Llama whose layers were each cut to their own measure.

A layer may lack its attention or its MLP, and has key heads and an inner size of its own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from vllmx.models.utils import layer_index

PAIRWISE = ("mistral_yarn", "rope_llama4")
"""Values of position_embedding_type with which neighbours are rotated."""
ELSEWHERE = {
    "attention": ("num_sink_tokens", "replace_with_linear", "sparsify", "window_length"),
    "ffn": ("replace_with_linear", "sparsify"),
}
"""Keys of the two parts of a block that ask for what isn't built."""
MULTIPLE = 256
"""Inner sizes that follow from ffn_mult are rounded up to such."""


def part_of(config: HFConfig, layer: int, name: str) -> dict[str, Any]:
    """`attention` or `ffn` of the layer's entry in block_configs; CheckpointError where it isn't
    there or asks for more than is built."""
    blocks = config.read("block_configs", list)
    if len(blocks) != config.num_hidden_layers:
        raise CheckpointError(
            f"{config.origin}: block_configs has {len(blocks)} entries for "
            f"{config.num_hidden_layers} layers."
        )
    part = blocks[layer].get(name)
    if not isinstance(part, dict):
        raise CheckpointError(f"{config.origin}: block_configs[{layer}] has no {name!r}.")
    for key in ELSEWHERE[name]:
        if part.get(key):
            raise CheckpointError(
                f"{config.origin}: block_configs[{layer}].{name}.{key} is set, which is not "
                "supported."
            )
    return part


def inner_size(config: HFConfig, ffn: dict[str, Any]) -> int:
    """Of a layer's MLP: told, or by a multiple of the hidden size."""
    if ffn.get("ffn_mult") is None:
        return int(ffn["intermediate_size"])
    return -(-int(2 * ffn["ffn_mult"] * config.hidden_size / 3) // MULTIPLE) * MULTIPLE


class DeciLMAttention(LlamaAttention):
    """Llama's, with as many key heads as the layer's block says."""

    def heads_of(self, config: HFConfig, layer: int) -> tuple[int, int]:
        """Queries share a key by n_heads_in_group."""
        heads = config.num_attention_heads
        return heads, heads // int(part_of(config, layer, "attention")["n_heads_in_group"])


class DeciLMDecoderLayer(LlamaDecoderLayer):
    """Llama's order of what the layer has."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        nn.Module.__init__(self)
        for key in ("bias", "qkv_bias"):
            if config.read(key, bool, False):
                raise CheckpointError(f"{config.origin}: {key}=True is not supported.")
        kind = config.read("position_embedding_type", (str, type(None)), None)
        if kind in PAIRWISE:
            raise CheckpointError(
                f"{config.origin}: position_embedding_type={kind!r} is not supported."
            )
        layer = layer_index(prefix)
        attention, ffn = (part_of(config, layer, name) for name in ("attention", "ffn"))
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.has_attention, self.has_mlp = not attention.get("no_op"), not ffn.get("no_op")
        if self.has_attention:
            self.self_attn = DeciLMAttention(config, prefix=f"{prefix}.self_attn", **shared)
            self.input_layernorm = self.make_norm(config, ops)
        if self.has_mlp:
            if ffn.get("hidden_act", config.hidden_act) != config.hidden_act:
                raise CheckpointError(
                    f"{config.origin}: block_configs[{layer}].ffn.hidden_act is another than "
                    "hidden_act, which is not supported."
                )
            self.mlp = LlamaMLP(
                config,
                intermediate_size=inner_size(config, ffn),
                prefix=f"{prefix}.mlp",
                **shared,
            )
            self.post_attention_layernorm = self.make_norm(config, ops)

    @staticmethod
    def _normed(norm: Any, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        if residual is None:
            return norm(hidden_states), hidden_states.clone()
        return norm(hidden_states, residual)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output, residual), whose sum is what the next layer norms."""
        if self.has_attention:
            hidden_states, residual = self._normed(self.input_layernorm, hidden_states, residual)
            hidden_states = self.self_attn(positions, hidden_states)
        if self.has_mlp:
            hidden_states, residual = self._normed(
                self.post_attention_layernorm, hidden_states, residual
            )
            hidden_states = self.mlp(hidden_states)
        return hidden_states, residual


class DeciModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = DeciLMDecoderLayer


class DeciLMForCausalLM(LlamaForCausalLM):
    """DeciLM with its output head."""

    model_cls = DeciModel
