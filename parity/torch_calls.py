# SPDX-License-Identifier: Apache-2.0
"""Calls our ops with a case's arguments: the one place of the op lane that knows torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.ir.op import IrOpImpl

from .dtypes import Array
from .inputs import Arguments, Case
from .op_table import OpEntry
from .sampler_calls import CALLS

TORCH_DTYPES = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i64": torch.int64,
    "i32": torch.int32,
    "u8": torch.uint8,
    "bool": torch.bool,
}
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
Outputs = dict[str, Array]


def tensors_of(array: Array, device: str) -> Tensor:
    """A tensor of its own with the elements of `array`."""
    tensor = torch.from_numpy(array.data.copy())
    if array.dtype == "bf16":
        tensor = tensor.view(torch.bfloat16)
    return tensor.to(device)


def array_of(tensor: Tensor) -> Array:
    """The elements of a tensor."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return Array("bf16", tensor.view(torch.int16).numpy().view(np.uint16).copy())
    return Array(NAMES[tensor.dtype], tensor.numpy().copy())


class Call:
    """One op of one provider with the arguments of one case, ready to run any number of times."""

    def __init__(
        self,
        entry: OpEntry,
        case: Case,
        arguments: Arguments,
        impl: IrOpImpl | None,
        device: str = "cpu",
    ) -> None:
        self.entry = entry
        self.case = case
        self.device = device
        self.arguments = arguments
        self.impl = impl
        self.calls = 0
        self.function: Callable[..., Any] = CALLS[entry.name] if impl is None else impl.fn

    def __call__(self) -> Outputs:
        """The outputs on fresh copies of the arguments; ValueError where an argument changed that
        the op may only read."""
        given = {name: self._argument(name, value) for name, value in self.arguments.items()}
        passed = dict(given)
        if self.impl is not None and self.impl.prepare is not None:
            static = [passed.pop(name) for name in self.impl.op.static_args]
            passed["prepared"] = self.impl.prepare(*static)
        result = self.function(**passed)
        if self.impl is not None:
            result = self.impl.op.canonical(result)
        self.calls += 1
        self._check_untouched(given)
        return self._named(result, given)

    def _argument(self, name: str, value: Any) -> Any:
        if not isinstance(value, Array):
            return TORCH_DTYPES[value] if name == "dtype" else value
        tensor = tensors_of(value, self.device)
        if name not in self.case.strided:
            return tensor
        # A slice of something wider, as queries are of the fused projection.
        shape = (*tensor.shape[:-1], tensor.shape[-1] + 16)
        if tensor.dim() == 3:
            shape = (tensor.shape[0], tensor.shape[1] + 1, tensor.shape[2])
        wide = torch.full(shape, float("nan"), dtype=tensor.dtype, device=tensor.device)
        part = wide[:, : tensor.shape[1]] if tensor.dim() == 3 else wide[..., : tensor.shape[-1]]
        part.copy_(tensor)
        return part

    def _check_untouched(self, given: dict[str, Any]) -> None:
        if self.entry.name == "fused_add_rms_norm" or self.entry.sampler:
            return  # these may write what they were given
        for name, value in self.arguments.items():
            if isinstance(value, Array) and name not in self.entry.mutates:
                after = array_of(given[name])
                if after.tobytes() != value.tobytes():
                    raise ValueError(f"{self.entry.name} changed its argument {name}")

    def _named(self, result: Any, given: dict[str, Any]) -> Outputs:
        names = [name for name in self.entry.outputs if name not in self.entry.mutates]
        results = result if isinstance(result, tuple) else (result,) if names else ()
        named = dict(zip(names, results, strict=True))
        named |= {name: given[name] for name in self.entry.mutates}
        return {name: array_of(value) for name, value in named.items() if value is not None}
