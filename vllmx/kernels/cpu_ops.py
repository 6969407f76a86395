# SPDX-License-Identifier: Apache-2.0
"""Provider `cpu`: the same ops in fewer or fused torch calls, for float32 on a CPU.

At one token a decode step is bound by the number of torch calls, not by arithmetic: in a running
model, between two large matrix products, each costs 5 to 10 us. Measured there on the 2-core
development machine (SmolLM2-135M, one row), before and after: norm with residual 61 and 36 us,
rotation of queries and keys 82 and 35 us, writing the cache 27 and 22 us.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.ir.op import OpContext, float32_on_cpu
from vllmx.ir.ops.activation import gelu_and_mul, silu_and_mul
from vllmx.ir.ops.kv_cache import reshape_and_cache
from vllmx.ir.ops.layernorm import (
    WHOLE_ROWS_ONLY,
    fused_add_rms_norm,
    rms_norm,
    whole_rows_where,
)
from vllmx.ir.ops.rotary import rotary_embedding

FEW_ROWS = 64
"""Rows up to which fewer ops beat less arithmetic; 120 us against 240 us at 512 rows of 576."""


def _whole_neox_heads(context: OpContext) -> bool | str:
    facts = context.facts
    if not facts.get("is_neox_style", True):
        return "rotates halves (NeoX style) only, not pairs"
    if facts.get("rotary_dim") != facts.get("head_size"):
        return f"rotates whole heads only, not {facts['rotary_dim']} of {facts['head_size']}"
    return float32_on_cpu(context)


def _doubled(weight: Tensor | None) -> Tensor | None:
    """(weight, weight), for the layer norm of (x, -x)."""
    return None if weight is None else torch.cat((weight, weight))


@rms_norm.register_impl("cpu", supports=whole_rows_where(float32_on_cpu), prepare=_doubled)
def _rms_norm(
    x: Tensor, prepared: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    """rms_norm as the layer norm of (x, -x): that has mean zero and the same variance.

    torch's CPU rms_norm is a chain of ten ops, its layer_norm is one kernel.
    """
    if variance_size is not None:
        raise ValueError(WHOLE_ROWS_ONLY)
    hidden = x.shape[-1]
    if x.shape[0] > FEW_ROWS:
        weight = None if prepared is None else prepared[:hidden]
        return F.rms_norm(x, (hidden,), weight, epsilon)
    mirrored = torch.cat((x, -x), dim=-1)
    return torch.layer_norm(mirrored, (2 * hidden,), prepared, None, epsilon)[..., :hidden]


@fused_add_rms_norm.register_impl(
    "cpu", supports=whole_rows_where(float32_on_cpu), prepare=_doubled
)
def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    prepared: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    total = x_residual.add_(x)
    return _rms_norm(total, prepared, epsilon, variance_size), total


@silu_and_mul.register_impl("cpu", supports=float32_on_cpu)
def _silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


@gelu_and_mul.register_impl("cpu", supports=float32_on_cpu)
def _gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


class AngleRows:
    """Rows of the angle table for the tokens of a step, looked up once for all layers.

    A step's layers share one positions tensor, which is never written again: the rows found for
    it stay right as long as it is the same object.
    """

    def __init__(self, cos_sin_cache: Tensor) -> None:
        cos, sin = cos_sin_cache.chunk(2, dim=-1)
        self.table = torch.cat((cos, cos, -sin, sin), dim=-1)
        self.positions: Tensor | None = None
        self.rows: tuple[Tensor, ...] = ()

    def at(self, positions: Tensor) -> tuple[Tensor, ...]:
        """(cos, cos) and (-sin, sin) of each token, [num_tokens, 1, head_size]."""
        if positions is not self.positions:
            self.rows = self.table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
            self.positions = positions
        return self.rows


@rotary_embedding.register_impl("cpu", supports=_whole_neox_heads, prepare=AngleRows)
def _rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    prepared: AngleRows,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    cos, sin = prepared.at(positions)
    rotated = _rotate_halves(query, cos, sin, head_size)
    return rotated, None if key is None else _rotate_halves(key, cos, sin, head_size)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, head_size: int) -> Tensor:
    """x * (cos, cos) + (second, first) * (-sin, sin): whole rows, so that no copy is strided."""
    heads = x.view(x.shape[0], -1, head_size)
    swapped = heads.roll(head_size // 2, dims=-1)
    return swapped.mul_(sin).addcmul_(heads, cos).view(x.shape)


def _plain_cache(context: OpContext) -> bool | str:
    if context.facts.get("padded", False):
        return "expects no padding tokens, this caller has some"
    if context.facts.get("strided_blocks", False):
        return "expects evenly spaced slots, this attention backend reads others too"
    stored = context.facts.get("kv_cache_dtype", context.dtype)
    if stored != context.dtype:
        return f"stores what it is given, and does not convert it to {stored}"
    return float32_on_cpu(context)


@reshape_and_cache.register_impl("cpu", supports=_plain_cache)
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    # view, not flatten: a cache whose slots are not evenly spaced must fail, not be copied.
    slots = (-1, *key_cache.shape[2:])
    key_cache.view(slots).index_copy_(0, slot_mapping, key)
    value_cache.view(slots).index_copy_(0, slot_mapping, value)
