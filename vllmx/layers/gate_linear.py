# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_moe/router/gate_linear.py @ v0.25.0
"""The matrix that a router scores its experts with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder


class GateLinear(WeightHolder, nn.Module):
    """Router logits in float32, weights too, whatever dtype the model is served in.

    e_score_correction_bias: float32 [E] of the checkpoint, with `correction_bias`: not added to
    the logits but known to who chooses; the same tensor before and after loading.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, ops: OpTable, correction_bias: bool = False
    ) -> None:
        super().__init__()
        self.shape = (num_experts, hidden_size)
        self.ops = ops
        self.weight: Tensor
        self.e_score_correction_bias: Tensor | None = None
        if correction_bias:
            self.e_score_correction_bias = torch.zeros(num_experts, device=ops.device)
        self._linear = ops.reference("linear").fn

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """The matrix, and the bias where there is one."""
        expected: dict[tuple[str, str | None], tuple[int, ...]] = {("weight", None): self.shape}
        if self.e_score_correction_bias is not None:
            expected["e_score_correction_bias", None] = self.shape[:1]
        return expected

    def checkpoint_name(self, param: str, shard_id: str | None) -> str | None:
        """The bias by its own name: families keep it beside the matrix or elsewhere."""
        return None if param == "weight" else param

    def finish_loading(self) -> None:
        """Keep both in float32."""
        self.weight = self.take_float("weight").to(self.ops.device).clone()
        if self.e_score_correction_bias is not None:
            self.e_score_correction_bias.copy_(self.take_float("e_score_correction_bias"))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [T, H] -> float32 [T, E]."""
        return self._linear(hidden_states.float(), self.weight)
