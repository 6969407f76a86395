# SPDX-License-Identifier: Apache-2.0
"""What most families with experts have for an MLP: a router, experts, one MLP that all share."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.ir.select import OpTable
from vllmx.layers.fused_moe import FusedMoE, check_groups, check_top_k, moe_activation
from vllmx.layers.gate_linear import GateLinear
from vllmx.layers.linear import ReplicatedLinear
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP


def groups_of(config: HFConfig, num_experts: int) -> tuple[int, int]:
    """n_group and topk_group, each 1 where a config has null or nothing; CheckpointError where
    experts can't be in so many groups, or so many of them be chosen."""
    told = [config.read(key, (int, type(None)), None) for key in ("n_group", "topk_group")]
    groups, kept = (1 if number is None else number for number in told)
    check_groups(groups, kept, num_experts, config.origin)
    return groups, kept


class SharedExpertsMoE(nn.Module):
    """Experts that the router chooses; and what `shared_size` elements add for every token.

    float_gate: the router is computed in float32. correction_bias: it has a bias for the choice,
    and is computed so too. Other arguments are those of FusedMoE.
    """

    def __init__(
        self,
        config: HFConfig,
        num_experts: int,
        top_k: int,
        intermediate_size: int,
        shared_size: int = 0,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
        float_gate: bool = False,
        correction_bias: bool = False,
        **router: Any,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        hidden = config.hidden_size
        bias: Tensor | None = None
        if float_gate or correction_bias:
            gate = GateLinear(hidden, num_experts, ops, correction_bias)
            self.gate: nn.Module = gate
            bias = gate.e_score_correction_bias
        else:
            self.gate = ReplicatedLinear(hidden, num_experts, prefix=f"{prefix}.gate", **shared)
        self.experts = FusedMoE(
            num_experts,
            check_top_k(top_k, num_experts, config.origin),
            hidden,
            intermediate_size,
            ops,
            e_score_correction_bias=bias,
            activation=moe_activation(config.hidden_act, config.origin),
            **router,
        )
        self.shared_experts: LlamaMLP | None = None
        if shared_size:
            self.shared_experts = LlamaMLP(
                config,
                intermediate_size=shared_size,
                prefix=f"{prefix}.shared_experts",
                **shared,
            )

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        routed = self.experts(x, self.gate(x))
        return routed if self.shared_experts is None else routed + self.shared_experts(x)
