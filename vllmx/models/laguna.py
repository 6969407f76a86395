# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/laguna.py @ v0.25.0
"""Laguna: layers with heads of their own number, gated by softplus; experts by sigmoid."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.layers.linear import ColumnParallelLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaMLP, LlamaModel
from vllmx.models.qwen3 import Qwen3Attention
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index

REFUSED = (
    "attention_bias",
    "moe_apply_router_weight_on_input",
    "qkv_bias",
    "swa_attention_sink_enabled",
    "swa_rope_parameters",
)
GATES = (True, False, "per-head", "per-element")


class LagunaAttention(Qwen3Attention):
    """Normed queries and keys; what comes out is multiplied by a number of each head or element."""

    def __init__(self, config: HFConfig, *, prefix: str, **shared: Any) -> None:
        super().__init__(config, prefix=prefix, **shared)
        gating = config.read("gating", (bool, str))
        if gating not in GATES:
            raise CheckpointError(
                f"{config.origin}: gating is {gating!r}; per-head and per-element are known."
            )
        elements = 1 if gating == "per-element" else self.head_dim
        self.gate_shape = (self.q_size // elements, elements)
        self.g_proj: ColumnParallelLinear | None = None
        if gating:
            self.g_proj = ColumnParallelLinear(
                config.hidden_size, self.gate_shape[0], prefix=f"{prefix}.g_proj", **shared
            )

    def heads_of(self, config: HFConfig, layer: int) -> tuple[int, int]:
        """Queries' by num_attention_heads_per_layer, where it is there."""
        told = config.read("num_attention_heads_per_layer", (list, type(None)), None)
        heads = config.num_attention_heads if told is None else told[layer]
        return heads, config.num_key_value_heads

    def _attended(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        qkv = self.qkv_proj(hidden_states)
        if self.fused_qkv is not None:
            return self.fused_qkv.attend(positions, qkv)
        qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
        q, k = self.prepare(positions, qk)
        return self.attn(q, k, v)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        out = self._attended(positions, hidden_states)
        if self.g_proj is not None:
            gate = F.softplus(self.g_proj(hidden_states).float()).to(out.dtype)
            out = (out.unflatten(-1, self.gate_shape) * gate.unsqueeze(-1)).flatten(-2)
        return self.o_proj(out)


class LagunaMoE(SharedExpertsMoE):
    """Experts by sigmoid with a bias for the choice, whose scores may be capped before."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(
            config,
            config.read("num_experts", int),
            config.read("num_experts_per_tok", int),
            config.read("moe_intermediate_size", int),
            config.read("shared_expert_intermediate_size", int),
            correction_bias=True,
            renormalize=config.read("norm_topk_prob", bool, True),
            scoring_func="sigmoid",
            routed_scaling_factor=config.read("moe_routed_scaling_factor", float),
            **shared,
        )
        self.cap = config.read("moe_router_logit_softcapping", float)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        scores = self.gate(x)
        if self.cap > 0.0:
            scores = self.cap * (scores / self.cap).tanh()
        routed = self.experts(x, scores)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


def laguna_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts; one MLP where mlp_layer_types or, without it, mlp_only_layers says so."""
    layer = layer_index(prefix)
    kinds = config.read("mlp_layer_types", (list, type(None)), None)
    only = config.read("mlp_only_layers", (list, type(None)), None)
    dense = layer in ([0] if only is None else only) or bool(
        (layer + 1) % config.read("decoder_sparse_step", int, 1)
    )
    if dense if kinds is None else kinds[layer] == "dense":
        return LlamaMLP(config, prefix=prefix, **shared)
    return LagunaMoE(config, prefix=prefix, **shared)


class LagunaDecoderLayer(LlamaDecoderLayer):
    """Llama's layer; what other models of the family may have is refused."""

    attention_cls = LagunaAttention
    mlp_cls = staticmethod(laguna_mlp)

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        for key in REFUSED:
            if key in config and getattr(config, key):
                raise CheckpointError(f"{config.origin}: {key} is set, which is not supported.")
        super().__init__(config, **shared)


class LagunaModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = LagunaDecoderLayer


class LagunaForCausalLM(LlamaForCausalLM):
    """Laguna with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={
            ".mlp.experts.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.shared_expert.": ".mlp.shared_experts.",
        },
    )
    model_cls = LagunaModel
