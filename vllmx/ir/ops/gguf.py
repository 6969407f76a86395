# SPDX-License-Identifier: Apache-2.0
"""Expanding the blocks of a GGUF weight."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.ggml import BLOCK_SIZES, GGMLType
from vllmx.ir.gguf_dequant import dequantize
from vllmx.ir.op import ANY_DEVICE, REFERENCE, register_op


@register_op
def dequantize_gguf(data: Tensor, qtype: int, dtype: torch.dtype) -> Tensor:
    """The values of quantised rows; data: uint8 [rows, bytes of a row], qtype: ggml's number.

    Returns [rows, values of a row] in `dtype`, computed in float32.
    """
    return dequantize(data, GGMLType(qtype), dtype)


dequantize_gguf.set_batch_invariant(REFERENCE, ANY_DEVICE)

QTYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


@dequantize_gguf.register_inputs
def _dequantize_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    qtype = GGMLType[QTYPES[case % len(QTYPES)]]
    rows, blocks = 3, 5
    shape = (rows, blocks * BLOCK_SIZES[qtype][1])
    # Bytes below 60 keep every fp16 scale among them finite.
    data = torch.randint(0, 60, shape, generator=generator, dtype=torch.uint8)
    return {"data": data.to(device), "qtype": int(qtype), "dtype": dtype}
