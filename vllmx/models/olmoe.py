# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/olmoe.py @ v0.25.0
"""OLMoE: Llama with experts, and queries and keys normed over all heads at once."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k, moe_activation
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel


class OlmoeMoE(nn.Module):
    """A router and its experts, whose shares are those among all experts."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_experts", int)
        self.gate = ReplicatedLinear(
            hidden, experts, vllm_config=vllm_config, ops=ops, prefix=f"{prefix}.gate"
        )
        self.experts = FusedMoE(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            config.intermediate_size,
            ops,
            config.read("norm_topk_prob", bool, False),
            activation=moe_activation(config.hidden_act, config.origin),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.gate(x))


class OlmoeAttention(LlamaAttention):
    """Grouped-query attention; one norm over all queries of a token, one over all keys."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        if config.read("clip_qkv", float, None) is not None:
            raise CheckpointError(f"{config.origin}: clip_qkv is set, which is not supported.")
        self.q_norm = RMSNorm(self.q_size, config.rms_norm_eps, shared["ops"])
        self.k_norm = RMSNorm(self.kv_size, config.rms_norm_eps, shared["ops"])

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Norm the queries and the keys of qk, [T, q_size + kv_size], then rotate."""
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        assert self.rotary_emb is not None
        q, rotated = self.rotary_emb(positions, self.q_norm(q), self.k_norm(k))
        assert rotated is not None
        return q, rotated


class OlmoeDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around OLMoE's attention and experts."""

    attention_cls = OlmoeAttention
    mlp_cls = OlmoeMoE


class OlmoeModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = OlmoeDecoderLayer


class OlmoeForCausalLM(LlamaForCausalLM):
    """OLMoE with its output head."""

    model_cls = OlmoeModel
