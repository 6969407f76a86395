# SPDX-License-Identifier: Apache-2.0
"""Provider `fbgemm`: linear layers with fp16-packed weights, float32 activations and sums.

It takes dense weights that fp16 holds, as it does those of bfloat16 checkpoints, and refuses others
of a float checkpoint, which it would round by up to 2^-11 of each. What was quantised (GGUF blocks)
it rounds, and so it does where kernel.ir_op_priority.linear names it. Half the memory traffic of
float32, which is what a decode step on a CPU is bound by: 2x its speed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.ir.op import OpContext, float32_on_cpu
from vllmx.ir.ops.linear import linear

LARGEST_FP16 = 65504.0
UNDERFLOW = 2.0**-25
"""What counts as held if no more is lost: half a step of the smallest fp16 numbers. Every bfloat16
checkpoint has weights below 2^-17, which lose that at most; fp16 holds its others as they are."""
OF_THE_LARGEST = 2.0**-17
"""No loss counts as none that is more of a matrix's largest weight: less than the 1e-5 that float32
providers may differ by. A matrix whose largest weight is 2^-8 or more meets it by UNDERFLOW."""
COMPARED_AT_ONCE = 1 << 20
"""Weights; the first of a matrix in float32 mostly tell."""


def _supported() -> bool | str:
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return "this build of torch has no fbgemm"
    if not hasattr(torch.ops.quantized, "linear_dynamic_fp16"):
        return "this build of torch has no quantized::linear_dynamic_fp16"
    return True


def rounding(weight: Tensor) -> float:
    """What packing loses of a float matrix [out, in] at a weight, once that is more than nothing
    (inf where one is too large); 0.0 where fp16 holds it, or where it has no finite weights, which
    packing refuses by name."""
    if weight.dtype == torch.float16:
        return 0.0
    largest = max(abs(float(bound)) for bound in weight.aminmax())
    if not math.isfinite(largest):
        return 0.0
    nothing = min(UNDERFLOW, OF_THE_LARGEST * largest)
    if weight.dtype == torch.bfloat16 and nothing == UNDERFLOW and largest <= LARGEST_FP16:
        return 0.0  # eight bits of a weight fit down to 2^-17, and below nothing else is lost
    for rows in weight.split(max(1, COMPARED_AT_ONCE // weight.shape[1])):
        exact = rows.to(torch.float32)
        loss = float((exact.half().to(torch.float32) - exact).abs().max())
        if loss > nothing:
            return loss
    return 0.0


def _takes(context: OpContext) -> bool | str:
    """Fact `weights`: the float matrices of the layer, which must not be rounded."""
    answer = float32_on_cpu(context)
    if answer is not True:
        return answer
    for weight in context.facts.get("weights", ()):
        if loss := rounding(weight):
            kind = str(weight.dtype).removeprefix("torch.")
            return (
                f"fp16 doesn't hold weights of the checkpoint's {kind}, one would be {loss:.2g} "
                "off; kernel.ir_op_priority.linear=[fbgemm] rounds them"
            )
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
    supports=_takes,
    prepare=_prepare,
    prepared_format="fp16 packed",
    prepared_bytes=2,
    batch_invariant=("cpu",) if _adds_up_alike() else (),
)
def _linear(x: Tensor, prepared: torch.ScriptObject) -> Tensor:
    return _LINEAR_DYNAMIC_FP16(x, prepared)
