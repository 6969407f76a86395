# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gpt_oss.py @ v0.25.0
"""gpt-oss: a sink beside the keys of each head, windows in every other layer, clamped experts.

Checkpoints in bfloat16 are served, as transformers writes them: experts stacked, gate and up taking
turns. Those that are packed in MXFP4 are refused by vllmx/quantization.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_top_k
from vllmx.layers.linear import ReplicatedLinear
from vllmx.layers.parameter import WeightHolder
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

SERVED = {"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}
"""What the config may say of biases, of the experts' activation and of its numbers."""


class GptOssAttention(WeightHolder, LlamaAttention):
    """Llama's attention with biases, and a score of each head that takes weight and gives none."""

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """On both sides, whatever the config says."""
        return True, True

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """The window of every other layer, and sinks."""
        return {**super().reach_of(config, layer), "has_sinks": True}

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The sinks, [heads]."""
        return {("sinks", None): (self.attn.num_heads,)}

    def finish_loading(self) -> None:
        """Give the sinks to attention, in the activation dtype."""
        ops = self.qkv_proj.ops
        self.attn.set_sinks(self.take_float("sinks").to(ops.device, ops.dtype))


class GptOssMLP(nn.Module):
    """A router with a bias, and experts with biases; the shares of those chosen add up to one."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, experts = config.hidden_size, config.read("num_local_experts", int)
        for key, served in SERVED.items():
            if (told := config.read(key, type(served), served)) != served:
                raise CheckpointError(
                    f"{config.origin}: {key} is {told}; gpt-oss is served with {served} only."
                )
        self.router = ReplicatedLinear(
            hidden, experts, True, vllm_config=vllm_config, ops=ops, prefix=f"{prefix}.router"
        )
        self.experts = FusedMoE(
            experts,
            check_top_k(config.read("num_experts_per_tok", int), experts, config.origin),
            hidden,
            config.intermediate_size,
            ops,
            activation="swigluoai_uninterleave",
            has_bias=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.experts(x, self.router(x))


class GptOssDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with sinks and experts."""

    attention_cls = GptOssAttention
    mlp_cls = GptOssMLP


class GptOssModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = GptOssDecoderLayer


class GptOssForCausalLM(LlamaForCausalLM):
    """gpt-oss with its output head."""

    model_cls = GptOssModel

    def adapt(self, name: str, weight: Any) -> Any:
        """Experts are stored [E, in, out], and gate and up in turns along `out`."""
        if ".mlp.experts." not in name or not isinstance(weight, Tensor):
            return weight
        if weight.dim() == 3:
            weight = weight.transpose(1, 2)
        if ".gate_up_proj" in name:
            weight = torch.cat((weight[:, ::2], weight[:, 1::2]), dim=1)
        return weight
