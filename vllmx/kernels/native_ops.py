# SPDX-License-Identifier: Apache-2.0
"""Provider `native`: one C call for what torch does in several, for float32 on a CPU.

At one token a decode step is bound by the number of calls, not by arithmetic: between two large
matrix products a torch call costs 5 to 10 us. Us a call in a running SmolLM2-135M on the 2-core
development machine, with provider `cpu` and with this one, at 1 and at 8 rows: norm with residual
51 to 28 and 71 to 28; rotation 51 to 20 and 62 to 19; activation 35 to 22 and 62 to 29; writing
the cache 33 to 8 and 41 to 10; attention 110 to 30 and 295 to 86.
Whole steps are in reports/cpu_speed.md. Attention's `native` is in
vllmx/attention/backends/native.py.
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
from vllmx.ir.row_by_row import row_by_row
from vllmx.kernels.native_library import library


def native_on_cpu(context: OpContext) -> bool | str:
    """float32 on a CPU, where the library could be compiled and loaded."""
    answer = float32_on_cpu(context)
    if answer is not True:
        return answer
    loaded = library()
    return loaded if isinstance(loaded, str) else True


def _rows(x: Tensor) -> Tensor:
    """x as [rows, last dimension], whose last dimension lies side by side."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


@rms_norm.register_impl(
    "native", supports=whole_rows_where(native_on_cpu), batch_invariant=("cpu",)
)
def _rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    if variance_size is not None:
        raise ValueError(WHOLE_ROWS_ONLY)
    rows = _rows(x)
    out = torch.empty(x.shape)
    count, hidden = rows.shape
    factor = None if weight is None else weight.data_ptr()
    library().native_rms_norm(
        rows.data_ptr(), rows.stride(0), None, 0, factor, out.data_ptr(), count, hidden, epsilon
    )
    return out


@fused_add_rms_norm.register_impl(
    "native", supports=whole_rows_where(native_on_cpu), batch_invariant=("cpu",)
)
def _fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    if variance_size is not None:
        raise ValueError(WHOLE_ROWS_ONLY)
    rows, residual = _rows(x), _rows(x_residual)
    out = torch.empty(x.shape)
    library().native_rms_norm(
        rows.data_ptr(),
        rows.stride(0),
        residual.data_ptr(),
        residual.stride(0),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        *rows.shape,
        epsilon,
    )
    return out, residual.view(x.shape)


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x as rows, and room for half of each."""
    return _rows(x), torch.empty((*x.shape[:-1], x.shape[-1] // 2))


@silu_and_mul.register_impl("native", supports=native_on_cpu, batch_invariant=("cpu",))
def _silu_and_mul(x: Tensor) -> Tensor:
    rows, out = _halves(x)
    library().native_silu_and_mul(
        rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], out.shape[-1]
    )
    return out


@gelu_and_mul.register_impl("native", supports=native_on_cpu, batch_invariant=("cpu",))
def _gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    if approximate != "tanh":
        gate, up = x.chunk(2, dim=-1)
        return F.gelu(gate, approximate=approximate).mul_(up)
    rows, out = _halves(x)
    library().native_gelu_tanh_and_mul(
        rows.data_ptr(), rows.stride(0), out.data_ptr(), rows.shape[0], out.shape[-1]
    )
    return out


# The other form of gelu is torch's, which cuts many rows where a vector ends otherwise.
gelu_and_mul.set_batch_invariant("native", ("cpu",), row_by_row(_gelu_and_mul, "x"))


@rotary_embedding.register_impl("native", supports=native_on_cpu, batch_invariant=("cpu",))
def _rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> tuple[Tensor, Tensor | None]:
    rotated = _rotate(positions, query, head_size, cos_sin_cache, is_neox_style)
    if key is None:
        return rotated, None
    return rotated, _rotate(positions, key, head_size, cos_sin_cache, is_neox_style)


def _rotate(
    positions: Tensor, x: Tensor, head_size: int, cos_sin_cache: Tensor, is_neox_style: bool
) -> Tensor:
    rows = x if x.dim() == 2 else x.flatten(1)
    out = torch.empty(x.shape)
    tokens, size = rows.shape
    library().native_rotary(
        positions.data_ptr(),
        cos_sin_cache.data_ptr(),
        rows.data_ptr(),
        rows.stride(0),
        out.data_ptr(),
        tokens,
        size // head_size,
        head_size,
        cos_sin_cache.shape[1],
        is_neox_style,
    )
    return out


def _stores_float32(context: OpContext) -> bool | str:
    if context.facts.get("strided_blocks", False):
        return "expects evenly spaced slots, this attention backend reads others too"
    stored = context.facts.get("kv_cache_dtype", torch.float32)
    if stored != torch.float32:
        return f"stores what it is given, and does not convert it to {stored}"
    return native_on_cpu(context)


@reshape_and_cache.register_impl("native", supports=_stores_float32, batch_invariant=("cpu",))
def _reshape_and_cache(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    tokens, heads, head_size = key.shape
    library().native_reshape_and_cache(
        key.data_ptr(),
        key.stride(0),
        value.data_ptr(),
        value.stride(0),
        key_cache.data_ptr(),
        slot_stride(key_cache),
        value_cache.data_ptr(),
        slot_stride(value_cache),
        slot_mapping.data_ptr(),
        tokens,
        heads * head_size,
    )


def slot_stride(cache: Tensor) -> int:
    """Elements from one slot of a cache to the next, also from one block's last to the next's."""
    blocks, block_size, _, head_size = cache.shape
    block, slot, head, element = cache.stride()
    assert element == 1 and head == head_size and (blocks == 1 or block == block_size * slot), (
        f"a cache of shape {tuple(cache.shape)} with strides {cache.stride()}"
    )
    return slot
