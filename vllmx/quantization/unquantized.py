# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/linear.py (UnquantizedLinearMethod) @ v0.25.0
"""Float weights, handed to the chosen linear provider; by default to none that rounds them."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import IrOpImpl, OpContext
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import to_float
from vllmx.quantization.base_config import LinearMethodBase, PackedLinear

logger = logging.getLogger(__name__)

MAX_PREPARED_BYTES = 128 << 20
"""Float32 bytes expanded at once while packing; larger matrices (heads) are packed in pieces."""


class LinearMethod(LinearMethodBase):
    """Dense weights: packed by the provider, or kept in the activation dtype."""

    def pack(self, weights: list[Any], biases: list[Any] | None, ops: OpTable) -> PackedLinear:
        """See LinearMethodBase.pack."""
        impl = exact_provider(weights, ops)
        if impl.prepare is None:
            return dense_linear(weights, biases, ops, impl, ops.dtype)
        return prepared_linear(weights, biases, impl, " and ".join(dtype_names(weights)))


def exact_provider(weights: list[Any], ops: OpTable) -> IrOpImpl:
    """The linear provider of a layer with these weights; one that would round those of them that
    are stored as floats only where kernel.ir_op_priority names it."""
    if "linear" in ops.explicit:
        return ops.choose("linear", weight="dense")
    floats = [weight for weight in weights if isinstance(weight, Tensor)]
    impl = ops.choose("linear", weight="dense", weights=floats)
    usual = ops.choose("linear", weight="dense")
    if impl.provider != usual.provider:
        _tell_once(impl, usual, OpContext(ops.device, ops.dtype, {"weights": floats}), ops)
    return impl


def _tell_once(impl: IrOpImpl, usual: IrOpImpl, context: OpContext, ops: OpTable) -> None:
    """Log for the first layer of an engine that `impl` stands in for `usual`, and why."""
    mine = object()
    if ops.shared.setdefault(("linear", impl.provider, usual.provider), mine) is mine:
        logger.info(
            "Linear layers whose weights %s would round run in %s: %s.",
            usual.provider,
            impl.provider,
            usual.refusal(context),
        )


def dtype_names(weights: list[Any]) -> list[str]:
    """Names of the types that the checkpoint stores these weights in."""
    names = (
        str(w.dtype).removeprefix("torch.") if isinstance(w, Tensor) else w.qtype.name
        for w in weights
    )
    return sorted(set(names))


def dense_linear(
    weights: list[Any],
    biases: list[Any] | None,
    ops: OpTable,
    impl: IrOpImpl,
    dtype: torch.dtype,
) -> PackedLinear:
    """Keep the stacked weights as one tensor of `dtype`."""
    weight = torch.cat([to_float(w, dtype) for w in weights]).to(ops.device)
    bias = None
    if biases is not None:
        bias = torch.cat([to_float(b) for b in biases]).to(ops.device, ops.dtype)
    return PackedLinear(
        apply=partial(impl.fn, weight=weight, bias=bias),
        format=f"{str(dtype).removeprefix('torch.')} (from {' and '.join(dtype_names(weights))})",
        nbytes=weight.nbytes + (0 if bias is None else bias.nbytes),
        dense=weight if dtype == ops.dtype else None,
    )


def prepared_linear(
    weights: list[Any], biases: list[Any] | None, impl: IrOpImpl, source: str
) -> PackedLinear:
    """Let the provider pack the stacked weights, a large matrix in pieces of rows."""
    rows, columns = sum(w.shape[0] for w in weights), weights[0].shape[1]
    bias = None if biases is None else torch.cat([to_float(b) for b in biases])
    step = max(1, MAX_PREPARED_BYTES // (4 * columns))
    assert impl.prepare is not None
    if rows <= step:
        whole = torch.cat([to_float(w) for w in weights])
        apply = partial(impl.fn, prepared=impl.prepare(whole, bias))
    else:
        pieces = []
        for weight in weights:
            for start in range(0, weight.shape[0], step):
                piece = _rows(weight, start, min(start + step, weight.shape[0]))
                pieces.append(impl.prepare(piece, None))
        apply = partial(_apply_pieces, fn=impl.fn, pieces=pieces, bias=bias)
    return PackedLinear(
        apply, f"fp16 packed by {impl.provider} (from {source})", 2 * rows * columns
    )


def _rows(weight: Any, start: int, stop: int) -> Tensor:
    if isinstance(weight, Tensor):
        return weight[start:stop].to(torch.float32)
    return weight.dequantize(dtype=torch.float32, rows=slice(start, stop))


def _apply_pieces(x: Tensor, fn: Any, pieces: list[Any], bias: Tensor | None) -> Tensor:
    out = torch.cat([fn(x, prepared=piece) for piece in pieces], dim=-1)
    return out if bias is None else out.add_(bias)
