# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/dbrx.py @ v0.25.0
"""DBRX: norms without bias, clipped queries, keys and values, experts whose matrices lie in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k, moe_activation
from vllmx.layers.layernorm import LayerNorm
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllmx.models.olmo import OlmoAttention
from vllmx.models.utils import WeightsMapper


class DbrxExperts(FusedMoE):
    """Experts of which a checkpoint has three tensors a layer, each [E * I, H]: gate, up, down."""

    def __init__(
        self, num_experts: int, top_k: int, hidden: int, inner: int, *args: Any, **others: Any
    ) -> None:
        super().__init__(num_experts, top_k, hidden, inner, *args, **others)
        self._shape = (num_experts, inner, hidden)
        rows = (num_experts * inner, hidden)
        self._stacked = {(name, None): rows for name in ("w1", "v1", "w2")}
        self._expected = self._stacked

    def finish_loading(self) -> None:
        """Gate above up for each expert; down is stored on its side."""
        gate, up, down = (self.take_float(n).reshape(self._shape) for n in ("w1", "v1", "w2"))
        new: dict[str, Any] = {"dtype": self.ops.dtype, "device": self.ops.device}
        self.w13_weight = torch.cat((gate, up), dim=1).to(**new)
        self.w2_weight = down.transpose(1, 2).contiguous().to(**new)


class DbrxMoE(nn.Module):
    """A router and its experts, whose shares always add up to one."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_experts", int)
        self.gate = ReplicatedLinear(
            hidden, experts, vllm_config=vllm_config, ops=ops, prefix=f"{prefix}.gate"
        )
        self.experts = DbrxExperts(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            config.read("moe_intermediate_size", int),
            ops,
            activation=moe_activation(config.hidden_act, config.origin),
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.gate(x))


class DbrxDecoderLayer(LlamaDecoderLayer):
    """Llama's order; weights of experts that aren't shares are refused."""

    attention_cls = OlmoAttention
    mlp_cls = DbrxMoE

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        told = config.read("ffn_config", dict, {}).get("moe_normalize_expert_weights", 1.0)
        if told != 1.0:
            raise CheckpointError(
                f"{config.origin}: moe_normalize_expert_weights is {told}; 1.0 is served only."
            )
        super().__init__(config, **shared)

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """By mean and variance, with a weight; the config does not say its epsilon."""
        return LayerNorm(config.hidden_size, 1e-5, ops, has_bias=False)


class DbrxModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = DbrxDecoderLayer


class DbrxForCausalLM(LlamaForCausalLM):
    """DBRX with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        renamed={
            "transformer.wte.": "model.embed_tokens.",
            "transformer.norm_f.": "model.norm.",
            "transformer.blocks.": "model.layers.",
            ".norm_attn_norm.attn.Wqkv.": ".self_attn.qkv_proj.",
            ".norm_attn_norm.attn.out_proj.": ".self_attn.o_proj.",
            ".norm_attn_norm.norm_1.": ".input_layernorm.",
            ".norm_attn_norm.norm_2.": ".post_attention_layernorm.",
            ".ffn.router.layer.": ".mlp.gate.",
            ".ffn.experts.mlp.": ".mlp.experts.",
        },
    )
    model_cls = DbrxModel
