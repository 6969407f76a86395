# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_moe/layer.py @ v0.25.0
"""A layer of many experts, of which each token takes a few."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError, WeightError
from vllmx.ir.ops.fused_moe import SCORINGS
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder


class FusedMoE(WeightHolder, nn.Module):
    """`num_experts` gated MLPs, `top_k` of them a token, weighted by the router.

    A checkpoint has three matrices an expert (`3.gate_proj.weight`, shard id "3" here), named by
    `ckpt_names` (gate, down, up), or the experts of a layer stacked in two tensors, gate_up_proj
    [E, 2 I, H] and down_proj [E, H, I]. With `has_bias` each of the two has a tensor of biases.

    use_grouped_topk: a token's experts are of its best `topk_group` of `num_expert_group` groups.
    scoring_func: "softmax" or "sigmoid". e_score_correction_bias: float32 [E], added to the scores
    that experts are chosen by. routed_scaling_factor: of all weights. apply_router_weight_on_input:
    the one expert of a token gets it times its weight, and what it returns is not weighted.
    custom_routing_function: stands for all of that, [T, E] -> (float32 [T, K], int32 [T, K]).
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        ops: OpTable,
        renormalize: bool = True,
        *,
        use_grouped_topk: bool = False,
        num_expert_group: int = 1,
        topk_group: int = 1,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: Tensor | None = None,
        activation: str = "silu",
        has_bias: bool = False,
        apply_router_weight_on_input: bool = False,
        custom_routing_function: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
        ckpt_names: tuple[str, str, str] = ("gate_proj", "down_proj", "up_proj"),
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.top_k = top_k
        self.ops = ops
        self.activation = activation
        assert top_k == 1 or not apply_router_weight_on_input
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.ckpt_names = ckpt_names
        hidden, inner = hidden_size, intermediate_size
        gate, down, up = ckpt_names
        self._stacked: dict[tuple[str, str | None], tuple[int, ...]] = {
            ("gate_up_proj", None): (num_experts, 2 * inner, hidden),
            ("down_proj", None): (num_experts, hidden, inner),
        }
        if has_bias:
            self._stacked["gate_up_proj_bias", None] = (num_experts, 2 * inner)
            self._stacked["down_proj_bias", None] = (num_experts, hidden)
        self._each: dict[tuple[str, str | None], tuple[int, ...]] = {
            (part, str(expert)): shape
            for expert in range(num_experts)
            for part, shape in (
                (gate, (inner, hidden)),
                (up, (inner, hidden)),
                (down, (hidden, inner)),
            )
        }
        self._expected = self._stacked
        if scoring_func not in SCORINGS:
            raise CheckpointError(
                f"the router's scoring function is {scoring_func!r}; {' and '.join(SCORINGS)} are "
                "known."
            )
        groups = (num_expert_group, topk_group) if use_grouped_topk else (1, 1)
        self._route = custom_routing_function or self._router(
            renormalize, groups, scoring_func, routed_scaling_factor, e_score_correction_bias
        )
        self._experts = ops.bind(
            "fused_experts", hidden_size=hidden, intermediate_size=inner, activation=activation
        )
        self.w13_weight: Tensor
        self.w2_weight: Tensor
        self.w13_bias: Tensor | None = None
        self.w2_bias: Tensor | None = None

    def _router(
        self,
        renormalize: bool,
        groups: tuple[int, int],
        scoring_func: str,
        scale: float,
        bias: Tensor | None,
    ) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """router_logits [T, E] -> (weights, ids) [T, K]; the plain op where nothing is special."""
        if (groups[0], scoring_func, scale, bias) == (1, "softmax", 1.0, None):
            return partial(self.ops.bind("topk_softmax"), topk=self.top_k, renormalize=renormalize)
        return partial(
            self.ops.bind("grouped_topk", num_expert_group=groups[0]),
            topk=self.top_k,
            renormalize=renormalize,
            num_expert_group=groups[0],
            topk_group=groups[1],
            scoring_func=scoring_func,
            routed_scaling_factor=scale,
            e_score_correction_bias=bias,
        )

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """Stacked, or one by one once the first tensor has come that way."""
        return self._expected

    def load_weight(self, param: str, shard_id: str | None, tensor: Any, source_name: str) -> bool:
        """Take one tensor; the first one says in which of the two ways the others come."""
        if not self.loaded and not self.is_loaded:
            self._expected = self._stacked if shard_id is None else self._each
        elif (shard_id is None) != (self._expected is self._stacked):
            raise WeightError(
                f"weight {source_name}: the experts of its layer come both stacked and one by one.",
                source_name,
            )
        number = shard_id.partition(".")[0] if shard_id is not None else ""
        if number.isdecimal() and int(number) >= self.num_experts:
            raise WeightError(
                f"weight {source_name} is of expert {number}, counted from 0; the config tells of "
                f"{self.num_experts} experts.",
                source_name,
            )
        if not isinstance(tensor, Tensor):
            raise WeightError(
                f"weight {source_name} is quantised; experts are served in float only.", source_name
            )
        return super().load_weight(param, shard_id, tensor, source_name)

    def checkpoint_name(self, param: str, shard_id: str | None) -> str | None:
        """What a checkpoint calls a weight below this layer's name."""
        return param if shard_id is None else f"{shard_id}.{param}.weight"

    def finish_loading(self) -> None:
        """Put the experts one above the other, in the activation dtype, straight on the device."""
        assert self.loaded is not None
        new: dict[str, Any] = {"dtype": self.ops.dtype, "device": self.ops.device}
        shapes = self._stacked
        self.w13_weight = torch.empty(shapes["gate_up_proj", None], **new)
        self.w2_weight = torch.empty(shapes["down_proj", None], **new)
        if self._expected is self._stacked:
            self.w13_weight.copy_(self.loaded["gate_up_proj", None])
            self.w2_weight.copy_(self.loaded["down_proj", None])
        else:
            gate_name, down_name, up_name = self.ckpt_names
            for number in range(self.num_experts):
                expert = str(number)
                gate, up = self.w13_weight[number].chunk(2)
                gate.copy_(self.loaded[gate_name, expert])
                up.copy_(self.loaded[up_name, expert])
                self.w2_weight[number].copy_(self.loaded[down_name, expert])
        if ("gate_up_proj_bias", None) in self._expected:
            self.w13_bias = self.take_float("gate_up_proj_bias").to(**new)
            self.w2_bias = self.take_float("down_proj_bias").to(**new)

    def forward(self, hidden_states: Tensor, router_logits: Tensor) -> Tensor:
        """hidden_states: [T, H]; router_logits: [T, E] -> [T, H]."""
        weights, ids = self._route(router_logits)
        if self.apply_router_weight_on_input:
            hidden_states = (hidden_states * weights).to(hidden_states.dtype)
            weights = torch.ones_like(weights)
        return self._experts(
            hidden_states,
            self.w13_weight,
            self.w2_weight,
            weights,
            ids,
            self.activation,
            self.w13_bias,
            self.w2_bias,
        )


def check_top_k(top_k: int, num_experts: int, origin: str) -> int:
    """`top_k` of a config; CheckpointError where there are not so many experts."""
    if not 1 <= top_k <= num_experts:
        raise CheckpointError(
            f"{origin}: num_experts_per_tok is {top_k}, of {num_experts} experts."
        )
    return top_k


def check_groups(groups: int, kept: int, num_experts: int, origin: str) -> None:
    """CheckpointError where experts can't be in so many groups, or so many of them be chosen."""
    if groups < 1 or num_experts % groups or (groups > 1 and num_experts // groups < 2):
        raise CheckpointError(
            f"{origin}: n_group is {groups}; {num_experts} experts are not in so many groups."
        )
    if not 1 <= kept <= groups:
        raise CheckpointError(f"{origin}: topk_group is {kept}, of {groups} groups.")


def moe_activation(name: str, origin: str) -> str:
    """What upstream's experts call a config's `hidden_act`; CheckpointError for another one."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"{origin}: hidden_act is {name!r}; experts are served with "
            f"{', '.join(_ACTIVATIONS)} only."
        )
    return _ACTIVATIONS[name]


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
