# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/commandr.py @ v0.25.0
"""Cohere's Command R, and R7B with windows: side by side, one norm, neighbours rotated in pairs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import LayerNorm
from vllmx.layers.parameter import WeightHolder
from vllmx.layers.rotary_embedding import RotaryEmbedding
from vllmx.models.dense import ParallelDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP, LlamaModel


class HeadNorm(WeightHolder, nn.Module):
    """A norm by mean and variance of each head, with a weight for each of its elements."""

    def __init__(self, heads: int, head_dim: int, eps: float, ops: OpTable) -> None:
        super().__init__()
        self.shape = (heads, head_dim)
        self.eps, self.ops = eps, ops
        self._layer_norm = ops.bind("layer_norm")

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The one weight, [heads, head_dim]."""
        return {("weight", None): self.shape}

    def finish_loading(self) -> None:
        """Bring the weight to the activation dtype."""
        self.weight = self.take_float("weight").to(self.ops.device, self.ops.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, heads * head_dim] -> the same shape."""
        normed = self._layer_norm(x.unflatten(-1, self.shape), None, None, self.eps)
        return (normed * self.weight).flatten(-2)


class CohereAttention(LlamaAttention):
    """Rotated in pairs; in models with windows only the layers that have one are rotated."""

    is_neox_style = False

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        self.has_norms = config.read("use_qk_norm", bool, False)
        super().__init__(config, **shared)
        if self.has_norms:
            sizes = (config.head_dim, config.layer_norm_eps, shared["ops"])
            self.q_norm = HeadNorm(config.num_attention_heads, *sizes)
            self.k_norm = HeadNorm(config.num_key_value_heads, *sizes)

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """None in the full layers among those with a window."""
        if config.model_type == "cohere2" and config.layer_types[layer] == "full_attention":
            return None
        return super().rope_of(config, layer, max_model_len, ops)

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Norm where there are norms, then rotate."""
        if not self.has_norms:
            return super().prepare(positions, qk)
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        q, k = self.q_norm(q), self.k_norm(k)
        return (q, k) if self.rotary_emb is None else self.rotary_emb(positions, q, k)


class CohereDecoderLayer(ParallelDecoderLayer):
    """Attention and gated MLP of one norm, which has no bias."""

    attention_cls = CohereAttention
    mlp_cls: type[nn.Module] = LlamaMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """By mean and variance, with a weight."""
        return LayerNorm(config.hidden_size, config.layer_norm_eps, ops, has_bias=False)


class CohereModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = CohereDecoderLayer


class CohereForCausalLM(LlamaForCausalLM):
    """Command R with its (tied) output head."""

    model_cls = CohereModel

    def logit_scale(self, config: HFConfig) -> float:
        """A number of the config."""
        return config.logit_scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B: three of four layers have a window."""
