# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/llama4.py @ v0.25.0
"""Llama 4, text: chunked local attention between full layers without rotation, one expert a token.

Neighbours of a head are rotated in pairs, as checkpoints have them. The expert of a token gets it
times the sigmoid of its score, and one more expert is shared by all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, moe_activation
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.linear import ReplicatedLinear
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaMLP,
    LlamaModel,
)
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index

LONG = 32768
"""Tokens beyond which an engine scales late queries unless it is told otherwise."""


class Llama4MoE(nn.Module):
    """A router, the one expert that it chooses for each token, and the one that all share."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        if config.num_experts_per_tok != 1:
            raise CheckpointError(
                f"{config.origin}: num_experts_per_tok is {config.num_experts_per_tok}; Llama 4 is "
                "served with one expert a token."
            )
        hidden, experts = config.hidden_size, config.read("num_local_experts", int)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.router = ReplicatedLinear(hidden, experts, prefix=f"{prefix}.router", **shared)
        self.experts = FusedMoE(
            experts,
            1,
            hidden,
            config.intermediate_size,
            ops,
            renormalize=False,
            scoring_func="sigmoid",
            activation=moe_activation(config.hidden_act, config.origin),
            apply_router_weight_on_input=True,
        )
        self.shared_expert = LlamaMLP(config, prefix=f"{prefix}.shared_expert", **shared)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.router(x)) + self.shared_expert(x)


def llama4_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts in every interleave_moe_layer_step-th layer, one MLP in the others."""
    step = config.read("interleave_moe_layer_step", int)
    if step > 0 and (layer_index(prefix) + 1) % step == 0:
        return Llama4MoE(config, prefix=prefix, **shared)
    inner = config.read("intermediate_size_mlp", int)
    return LlamaMLP(config, intermediate_size=inner, prefix=prefix, **shared)


class Llama4Attention(LlamaAttention):
    """Rotated layers norm queries and keys, without a weight, and see their own chunk alone; the
    others see all, and their queries may grow with the logarithm of their place."""

    is_neox_style = False

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__(config, vllm_config=vllm_config, ops=ops, prefix=prefix)
        self.head_dim = config.head_dim
        self.qk_norm: RMSNorm | None = None
        if config.use_qk_norm and self.rotary_emb is not None:
            self.qk_norm = RMSNorm(config.head_dim, config.rms_norm_eps, ops, has_weight=False)
        self.attn_temperature_tuning = self.rotary_emb is None and is_tuned(config, vllm_config)
        self.floor_scale = config.read("floor_scale", float)
        self.attn_scale = config.read("attn_scale", float)

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None where no_rope_layers says 0."""
        if not config.no_rope_layers[layer]:
            return None
        return super().rope_of(config, layer, max_model_len, ops)

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """Its own chunk, or all."""
        chunked = config.layer_types[layer] == "chunked_attention"
        return {"attention_chunk_size": config.attention_chunk_size if chunked else None}

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate and norm, or scale the queries."""
        if self.qk_norm is not None:
            qk, _ = self.rotary_emb(positions, qk)  # type: ignore[misc]
            qk = self.qk_norm(qk.unflatten(-1, (-1, self.head_dim))).flatten(-2)
            q, k = qk.split((self.q_size, self.kv_size), dim=-1)
            return q, k
        q, k = super().prepare(positions, qk)
        if self.attn_temperature_tuning:
            times = torch.floor((positions + 1.0) / self.floor_scale)
            q = (q * (torch.log(times + 1.0) * self.attn_scale + 1.0).unsqueeze(-1)).to(q.dtype)
        return q, k


def is_tuned(config: HFConfig, vllm_config: VllmConfig) -> bool:
    """Whether late queries grow: as the generation config says, else where the engine takes more
    than 32768 tokens. As upstream, which does not heed config.json in this."""
    model_config = vllm_config.model_config
    longest = model_config.max_model_len or config.max_position_embeddings
    told = model_config.generation_config_dict or {}
    return bool(told.get("attn_temperature_tuning", longest > LONG))


class Llama4DecoderLayer(LlamaDecoderLayer):
    """Llama's layer around Llama 4's attention and experts."""

    attention_cls = Llama4Attention
    mlp_cls = staticmethod(llama4_mlp)


class Llama4Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = Llama4DecoderLayer


class Llama4ForCausalLM(LlamaForCausalLM):
    """Llama 4, without eyes, with its output head."""

    hf_to_vllm_mapper = WeightsMapper(LLAMA_MAPPER.stacked, renamed={".feed_forward.": ".mlp."})
    model_cls = Llama4Model
    layer_kinds = ("chunked_attention", "full_attention")

    def adapt(self, name: str, weight: Any) -> Any:
        """Experts are stored [E, in, out]."""
        stacked = ".experts." in name and isinstance(weight, Tensor) and weight.dim() == 3
        return weight.transpose(1, 2) if stacked else weight
