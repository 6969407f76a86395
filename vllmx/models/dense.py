# SPDX-License-Identifier: Apache-2.0
"""What dense decoders are made of where Llama's parts are not theirs: layers and an MLP.

A layer takes (positions, hidden_states, residual) and returns (output, residual), whose sum is the
stream; residual None says that the output is the whole of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.activation import get_act_fn
from vllmx.layers.layernorm import LayerNorm
from vllmx.layers.linear import ColumnParallelLinear, RowParallelLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaDecoderLayer


class PlainMLP(nn.Module):
    """down(act(up(x))): no gate."""

    has_bias = True

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.read("intermediate_size", int, None)
        sizes = (hidden, inner or 4 * hidden)
        bias = config.read("mlp_bias", bool, self.has_bias)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.up_proj = ColumnParallelLinear(*sizes, bias, prefix=f"{prefix}.up_proj", **shared)
        self.down_proj = RowParallelLinear(
            sizes[1], hidden, bias, prefix=f"{prefix}.down_proj", **shared
        )
        self.act_fn = get_act_fn(config.hidden_act, ops)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.up_proj(x)))


class LayerNormDecoderLayer(LlamaDecoderLayer):
    """Llama's order with norms by mean and variance."""

    mlp_cls: type[nn.Module] = PlainMLP

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """With weight and bias."""
        return LayerNorm(config.hidden_size, config.layer_norm_eps, ops)


class ParallelDecoderLayer(LayerNormDecoderLayer):
    """Attention and MLP of the same normed input, both added to the stream."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        del self.post_attention_layernorm

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.self_attn(positions, normed) + self.mlp(normed), None


class PostNormDecoderLayer(LlamaDecoderLayer):
    """Norms of what attention and MLP return, none of what they are given."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        del self.input_layernorm
        self.post_feedforward_layernorm = self.make_norm(config, shared["ops"])

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (the stream [T, H], None)."""
        attended = self.self_attn(positions, hidden_states)
        hidden_states = hidden_states + self.post_attention_layernorm(attended)
        return hidden_states + self.post_feedforward_layernorm(self.mlp(hidden_states)), None


class SandwichDecoderLayer(LlamaDecoderLayer):
    """Attention and MLP, each normed before and after."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        super().__init__(config, **shared)
        self.pre_feedforward_layernorm = self.make_norm(config, shared["ops"])
        self.post_feedforward_layernorm = self.make_norm(config, shared["ops"])

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return self.post_feedforward_layernorm(hidden_states), residual
