# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/fused_qk_norm_rope.py @ v0.25.0
"""Norms, rotation and gate of an attention layer in one call, where a provider has it."""

from __future__ import annotations

from torch import Tensor

from vllmx.ir.op import REFERENCE
from vllmx.ir.select import OpTable
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.rotary_embedding import RotaryEmbedding


class FusedQKNormRopeGate:
    """From projected queries with their gates, and keys, to what attention and the gate take."""

    def __init__(
        self, q_norm: RMSNorm, k_norm: RMSNorm, rotary_emb: RotaryEmbedding, ops: OpTable
    ) -> None:
        self.q_norm, self.k_norm, self.rotary_emb = q_norm, k_norm, rotary_emb
        self._fused = ops.bind("fused_qk_rmsnorm_rope_gate", **_facts(rotary_emb))

    @classmethod
    def of(
        cls, q_norm: RMSNorm, k_norm: RMSNorm, rotary_emb: RotaryEmbedding, ops: OpTable
    ) -> FusedQKNormRopeGate | None:
        """None where no provider has it all in one, or the layer rotates pairs."""
        impl = ops.choose("fused_qk_rmsnorm_rope_gate", **_facts(rotary_emb))
        if impl.provider == REFERENCE or not rotary_emb.is_neox_style:
            return None
        return cls(q_norm, k_norm, rotary_emb, ops)

    def takes(self, positions: Tensor) -> bool:
        """Whether tokens have one position each, [T], not one for each section, [3, T]."""
        return positions.dim() == 1

    def __call__(
        self, positions: Tensor, q_gate: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """positions: [T]; q_gate: [T, 2 * q_size], k: [T, kv_size] -> q, k and gate."""
        return self._fused(
            q_gate,
            k,
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary_emb.cos_sin_cache,
            positions,
            self.q_norm.variance_epsilon,
        )


def _facts(rotary_emb: RotaryEmbedding) -> dict[str, int]:
    return {"head_size": rotary_emb.head_size, "rotary_dim": rotary_emb.rotary_dim}
