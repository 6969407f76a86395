# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mixtral.py @ v0.25.0
"""Mixtral: Llama whose MLPs are experts, two of them a token."""

from __future__ import annotations

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k, moe_activation
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper


class MixtralMoE(nn.Module):
    """A router and its experts, whose shares always add up to one."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_local_experts", int)
        self.gate = ReplicatedLinear(
            hidden, experts, vllm_config=vllm_config, ops=ops, prefix=f"{prefix}.gate"
        )
        self.experts = FusedMoE(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            config.intermediate_size,
            ops,
            activation=moe_activation(config.hidden_act, config.origin),
            ckpt_names=("w1", "w2", "w3"),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.gate(x))


class MixtralDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with experts."""

    mlp_cls = MixtralMoE


class MixtralModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = MixtralDecoderLayer


class MixtralForCausalLM(LlamaForCausalLM):
    """Mixtral with its output head."""

    hf_to_vllm_mapper = WeightsMapper(LLAMA_MAPPER.stacked, renamed={".block_sparse_moe.": ".mlp."})
    model_cls = MixtralModel
