# SPDX-License-Identifier: Apache-2.0
"""GGUF weights: packed for the linear provider, kept as blocks, or kept in a half type.

They are never all expanded to float32, unless quant.gguf_weights=float32 asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import IrOpImpl
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import to_float
from vllmx.quantization.base_config import LinearMethodBase, PackedLinear
from vllmx.quantization.unquantized import (
    dense_linear,
    dtype_names,
    exact_provider,
    prepared_linear,
)

DENSE_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}


class LinearMethod(LinearMethodBase):
    """Weights of a GGUF file, quantised or not."""

    def pack(self, weights: list[Any], biases: list[Any] | None, ops: OpTable) -> PackedLinear:
        """See LinearMethodBase.pack; quant.gguf_weights decides the form."""
        form = self.vllm_config.quant_config.gguf_weights
        if form in DENSE_DTYPES:
            impl = _unprepared_linear(ops)
            return dense_linear(weights, biases, ops, impl, DENSE_DTYPES[form])
        if form == "auto":
            impl = exact_provider(weights, ops)
            if impl.prepare is not None:
                return prepared_linear(weights, biases, impl, " and ".join(dtype_names(weights)))
        return _block_linear(weights, biases, ops)


def _block_linear(weights: list[Any], biases: list[Any] | None, ops: OpTable) -> PackedLinear:
    bias = None
    if biases is not None:
        bias = torch.cat([to_float(b) for b in biases]).to(ops.device, ops.dtype)
    held = [w.to(ops.device) for w in weights]
    if len(held) > 1 and all(isinstance(w, Tensor) and w.dtype == ops.dtype for w in held):
        held = [torch.cat(held)]  # nothing is expanded: stacked once and not on each call
    nbytes = sum(w.nbytes for w in held) + (0 if bias is None else bias.nbytes)
    run = _unprepared_linear(ops).fn
    apply = partial(_expand_and_apply, weights=held, bias=bias, run=run)
    return PackedLinear(apply, f"GGUF blocks ({' and '.join(dtype_names(weights))})", nbytes)


def _unprepared_linear(ops: OpTable) -> IrOpImpl:
    """A provider that takes a dense weight as it is: the definition or, where what that gives may
    not depend on the batch, the one that was chosen."""
    if ops.batch_invariant:
        impl = ops.choose("linear", weight="dense")
        if impl.prepare is None:
            return impl
    return ops.reference("linear")


def _expand_and_apply(
    x: Tensor, weights: list[Any], bias: Tensor | None, run: Callable[..., Tensor]
) -> Tensor:
    dense = [to_float(w, x.dtype) for w in weights]
    return run(x, dense[0] if len(dense) == 1 else torch.cat(dense), bias)
