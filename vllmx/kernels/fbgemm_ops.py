# SPDX-License-Identifier: Apache-2.0
"""Provider `fbgemm`: linear layers with fp16-packed weights, float32 activations and sums.

Exact where a weight is representable in fp16, as bfloat16 checkpoints of usual scale are; else it
rounds the weight once, by at most 2^-11 relative. Half the memory traffic of float32, which is
what a decode step on a CPU is bound by: 2x its speed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.ir.op import float32_on_cpu
from vllmx.ir.ops.linear import linear

LARGEST_FP16 = 65504.0


def _supported() -> bool | str:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch has no fbgemm"
    if not hasattr(torch.ops.quantized, "linear_dynamic_fp16"):
        return "this build of torch has no quantized::linear_dynamic_fp16"
    return True


def _adds_up_alike() -> bool:
    """Whether an output is added up input by input whatever the number of rows: with AVX-512. Where
    there is none of it, one row alone goes another way than several."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _prepare(weight: Tensor, bias: Tensor | None) -> torch.ScriptObject:
    """Pack float weights [out, in]; CheckpointError if one is outside fp16's range."""
    largest = max(abs(float(bound)) for bound in weight.aminmax())
    if not largest <= LARGEST_FP16:
        raise CheckpointError(
            f"a weight of magnitude {largest:g} does not fit fp16; "
            "choose kernel.ir_op_priority.linear=[torch]"
        )
    bias32 = None if bias is None else bias.to(torch.float32)
    return torch.ops.quantized.linear_prepack_fp16(weight.to(torch.float32), bias32)


# Looked up once: the chain of attributes costs a microsecond, 121 times a step of SmolLM2.
_LINEAR_DYNAMIC_FP16: Any = (
    torch.ops.quantized.linear_dynamic_fp16 if _supported() is True else None
)


@linear.register_impl(
    "fbgemm",
    supported=_supported(),
    supports=float32_on_cpu,
    prepare=_prepare,
    prepared_format="fp16 packed",
    prepared_bytes=2,
    batch_invariant=("cpu",) if _adds_up_alike() else (),
)
def _linear(x: Tensor, prepared: torch.ScriptObject) -> Tensor:
    return _LINEAR_DYNAMIC_FP16(x, prepared)
