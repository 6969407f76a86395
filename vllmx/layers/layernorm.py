# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/layernorm.py @ v0.25.0
"""Norm layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder


class RMSNorm(WeightHolder, nn.Module):
    """Root-mean-square norm, optionally of the sum with a residual.

    has_weight: whether the checkpoint has one; where it has none, nothing is multiplied with.
    """

    def __init__(
        self, hidden_size: int, eps: float, ops: OpTable, *, has_weight: bool = True
    ) -> None:
        super().__init__()
        self.is_loaded = not has_weight
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.ops = ops
        self._norm = ops.choose("rms_norm", hidden_size=hidden_size)
        self._add_norm = ops.choose("fused_add_rms_norm", hidden_size=hidden_size)
        self._rms_norm, self._fused_add_rms_norm = self._norm.fn, self._add_norm.fn
        self.set_weight(torch.ones(hidden_size, dtype=ops.dtype))

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The one weight, [hidden_size]."""
        return {("weight", None): (self.hidden_size,)}

    def finish_loading(self) -> None:
        """Bring the weight to the activation dtype."""
        self.set_weight(self.take_float("weight").to(self.ops.dtype))

    def set_weight(self, weight: Tensor) -> None:
        """Hand the weight [hidden_size] to the chosen providers, which may lay it out anew."""
        self.weight = weight = weight.to(self.ops.device)
        self._norm_weight = self._norm.prepared(weight)
        self._add_norm_weight = self._add_norm.prepared(weight)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or (norm(x + residual), x + residual); x: [num_tokens, ..., hidden_size]."""
        if residual is None:
            return self._rms_norm(x, self._norm_weight, self.variance_epsilon)
        return self._fused_add_rms_norm(x, residual, self._add_norm_weight, self.variance_epsilon)


class GemmaRMSNorm(RMSNorm):
    """RMSNorm whose factor is 1 + weight, multiplied in float32."""

    def finish_loading(self) -> None:
        """Keep 1 + weight in float32: that is what every call multiplies with."""
        self.set_weight(self.take_float("weight") + 1.0)


class LayerNorm(WeightHolder, nn.Module):
    """Norm by mean and variance, optionally of the sum with a residual.

    has_weight, has_bias: what the checkpoint holds of it; a norm of neither has no parameters.
    less_one: the weight is stored less one, as Nemotron's is.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        ops: OpTable,
        *,
        has_weight: bool = True,
        has_bias: bool = True,
        less_one: bool = False,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.variance_epsilon = eps
        self.has_weight, self.has_bias, self.less_one = has_weight, has_bias, less_one
        self.ops = ops
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.is_loaded = not (has_weight or has_bias)
        self._layer_norm = ops.bind("layer_norm")

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """Weight and bias, [hidden_size], where it has them."""
        held = (("weight", self.has_weight), ("bias", self.has_bias))
        return {(name, None): (self.hidden_size,) for name, has in held if has}

    def finish_loading(self) -> None:
        """Bring them to the activation dtype and the device."""
        device, dtype = self.ops.device, self.ops.dtype
        if self.has_weight:
            self.weight = (self.take_float("weight") + float(self.less_one)).to(device, dtype)
        if self.has_bias:
            self.bias = self.take_float("bias").to(device, dtype)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x), or (norm(x + residual), x + residual); x: [num_tokens, hidden_size]."""
        if residual is None:
            return self._layer_norm(x, self.weight, self.bias, self.variance_epsilon)
        total = x + residual
        return self._layer_norm(total, self.weight, self.bias, self.variance_epsilon), total


class RMSNormGated(WeightHolder, nn.Module):
    """RMSNorm, then a gate: norm(x) * weight * activation(z), "silu" or "sigmoid"."""

    def __init__(
        self, hidden_size: int, eps: float, ops: OpTable, activation: str = "silu"
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.activation = activation
        self.ops = ops
        self._norm = ops.choose("rms_norm_gated", hidden_size=hidden_size)
        self._rms_norm_gated = self._norm.fn

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The one weight, [hidden_size]."""
        return {("weight", None): (self.hidden_size,)}

    def finish_loading(self) -> None:
        """Bring the weight to the activation dtype and the device."""
        self.weight = self.take_float("weight").to(self.ops.device, self.ops.dtype)
        self._norm_weight = self._norm.prepared(self.weight)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        """x, z: [..., hidden_size] -> x's shape."""
        return self._rms_norm_gated(x, self._norm_weight, z, self.eps, self.activation)
