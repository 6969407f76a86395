# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_moe/layer.py @ v0.25.0
"""A layer of many experts, of which each token takes a few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder, to_float


class FusedMoE(WeightHolder, nn.Module):
    """`num_experts` gated MLPs (silu), `top_k` of them a token, weighted by the router.

    A checkpoint has three matrices an expert (`3.gate_proj.weight`, shard id "3" here), or the
    experts of a layer stacked in two tensors, gate_up_proj [E, 2 I, H] and down_proj [E, H, I].
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        ops: OpTable,
        renormalize: bool = True,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.renormalize = renormalize
        self.ops = ops
        hidden, inner = hidden_size, intermediate_size
        self._stacked: dict[tuple[str, str | None], tuple[int, ...]] = {
            ("gate_up_proj", None): (num_experts, 2 * inner, hidden),
            ("down_proj", None): (num_experts, hidden, inner),
        }
        self._each: dict[tuple[str, str | None], tuple[int, ...]] = {
            (part, str(expert)): shape
            for expert in range(num_experts)
            for part, shape in (
                ("gate_proj", (inner, hidden)),
                ("up_proj", (inner, hidden)),
                ("down_proj", (hidden, inner)),
            )
        }
        self._expected = self._stacked
        self._route = ops.bind("topk_softmax")
        self._experts = ops.bind("fused_experts")
        self.w13_weight: Tensor
        self.w2_weight: Tensor

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """Stacked, or one by one once the first tensor has come that way."""
        return self._expected

    def load_weight(self, param: str, shard_id: str | None, tensor: Any, source_name: str) -> bool:
        """Take one tensor; the first one says in which of the two ways the others come."""
        if not self.loaded and not self.is_loaded:
            self._expected = self._stacked if shard_id is None else self._each
        elif (shard_id is None) != (self._expected is self._stacked):
            raise CheckpointError(
                f"weight {source_name}: the experts of its layer come both stacked and one by one."
            )
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"weight {source_name} is quantised; experts are served in float only."
            )
        return super().load_weight(param, shard_id, tensor, source_name)

    def checkpoint_name(self, param: str, shard_id: str | None) -> str | None:
        """What a checkpoint calls a weight below this layer's name."""
        return param if shard_id is None else f"{shard_id}.{param}.weight"

    def finish_loading(self) -> None:
        """Stack the experts, in the activation dtype."""
        assert self.loaded is not None
        if self._expected is self._stacked:
            w13, w2 = self.loaded[("gate_up_proj", None)], self.loaded[("down_proj", None)]
        else:
            experts = [str(expert) for expert in range(self.num_experts)]
            gate, up, w2 = (
                torch.stack([self.loaded[(part, expert)] for expert in experts])
                for part in ("gate_proj", "up_proj", "down_proj")
            )
            w13 = torch.cat((gate, up), dim=1)
        dtype, device = self.ops.dtype, self.ops.device
        # A copy: what was loaded may be a view of the memory-mapped file.
        self.w13_weight = to_float(w13, dtype).to(device).clone()
        self.w2_weight = to_float(w2, dtype).to(device).clone()

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """hidden_states: [T, H]; router_logits: [T, E] -> [T, H]."""
        weights, ids = self._route(router_logits, self.top_k, self.renormalize)
        return self._experts(hidden_states, self.w13_weight, self.w2_weight, weights, ids)
