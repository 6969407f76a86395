# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/cohere2_moe.py @ v0.25.0
"""Cohere's Command A+: R7B with experts behind the first layers, and a choice of norms."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.commandr import (
    CohereAttention,
    CohereDecoderLayer,
    CohereForCausalLM,
    CohereModel,
)
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaMLP
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import layer_index

SCORING = ("sigmoid", "softmax")
COMBINED = ("average", "sum")


def first_dense(config: HFConfig) -> int:
    """How many layers, from the first one on, have one MLP."""
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    if kinds is None:
        return config.read("first_k_dense_replace", int, 0)
    count = next((i for i, kind in enumerate(kinds) if kind != "dense"), len(kinds))
    if "dense" in kinds[count:]:
        raise CheckpointError(
            f"{config.origin}: mlp_layer_types has 'dense' behind other layers, which is not "
            "supported."
        )
    return count


class Cohere2MoeAttention(CohereAttention):
    """Full layers don't rotate, but for those that have one MLP in a model where those are full."""

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None where keys have no positions."""
        forced = layer < first_dense(config) and (
            config.read("prefix_dense_sliding_window_pattern", int) == 1
        )
        if config.layer_types[layer] == "full_attention" and not forced:
            return None
        return LlamaAttention.rope_of(self, config, layer, max_model_len, ops)


class Cohere2MoE(SharedExpertsMoE):
    """Experts, and what all tokens take: their sum or their mean."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        scoring = config.read("expert_selection_fn", str)
        combined = config.read("shared_expert_combination_strategy", str)
        for key, told, known in (
            ("expert_selection_fn", scoring, SCORING),
            ("shared_expert_combination_strategy", combined, COMBINED),
        ):
            if told not in known:
                raise CheckpointError(
                    f"{config.origin}: {key} is {told!r}; {' and '.join(known)} are known."
                )
        inner = config.intermediate_size
        count = config.read("num_shared_experts", int)
        super().__init__(
            config,
            config.read("num_experts", int),
            config.read("num_experts_per_tok", int),
            inner,
            inner * count,
            renormalize=config.read("norm_topk_prob", bool),
            scoring_func=scoring,
            **shared,
        )
        self.halved = bool(count) and combined == "average"

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        both = super().forward(x)
        return both / 2 if self.halved else both


def cohere2_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first layers, then experts."""
    if layer_index(prefix) >= first_dense(config):
        return Cohere2MoE(config, prefix=prefix, **shared)
    inner = config.read("prefix_dense_intermediate_size", (int, type(None)))
    return LlamaMLP(config, intermediate_size=inner, prefix=prefix, **shared)


class Cohere2MoeDecoderLayer(CohereDecoderLayer):
    """Attention and experts of one norm."""

    attention_cls = Cohere2MoeAttention
    mlp_cls = staticmethod(cohere2_mlp)  # type: ignore[assignment]

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """By root mean square where rms_norm_eps is set, else by mean and variance."""
        eps = config.read("rms_norm_eps", (float, type(None)))
        if eps is None:
            return CohereDecoderLayer.make_norm(config, ops)
        return RMSNorm(config.hidden_size, eps, ops)


class Cohere2MoeModel(CohereModel):
    """Embedding, layers, final norm."""

    layer_cls = Cohere2MoeDecoderLayer


class Cohere2MoeForCausalLM(CohereForCausalLM):
    """Command A+ with its (tied) output head."""

    model_cls = Cohere2MoeModel
