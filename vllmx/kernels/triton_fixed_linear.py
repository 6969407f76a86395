# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/batch_invariant.py (matmul_persistent) @ v0.25.0
"""Provider `triton_fixed` of linear layers: one cut of a matrix, however many rows there are.

A library takes another kernel for 1 row than for 64, and with it another order of the sums. Here
a tile of rows is always as large, filled up with zeros, and each output is summed over all inputs
in one program, tile after tile. parity/gpu_check.py tells what that costs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.ops.linear import linear
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"


if SUPPORTED is True:
    # A kernel made for one number of rows could order its sums otherwise than the next.
    @triton.jit(do_not_specialize=["num_rows"])
    def _fixed_tiles_linear_kernel(
        x_ptr,
        x_stride,
        weight_ptr,
        bias_ptr,
        out_ptr,
        num_rows,
        num_outputs,
        INPUTS: tl.constexpr,
        ROWS: tl.constexpr,
        OUTPUTS: tl.constexpr,
        COLUMNS: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        WIDE: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        inside, real = outputs < num_outputs, rows < num_rows
        columns = tl.arange(0, COLUMNS)
        x_rows = x_ptr + rows[:, None] * x_stride + columns[None, :]
        weights = weight_ptr + outputs.to(tl.int64)[:, None] * INPUTS + columns[None, :]
        total = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for begin in range(0, INPUTS, COLUMNS):
            there = (begin + columns < INPUTS)[None, :]
            x = tl.load(x_rows + begin, mask=real[:, None] & there, other=0.0)
            weight = tl.load(weights + begin, mask=inside[:, None] & there, other=0.0)
            if WIDE:
                x = x.to(tl.float32)
                weight = weight.to(tl.float32)
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(bias_ptr + outputs, mask=inside, other=0.0).to(tl.float32)
            total += bias[None, :]
        places = rows[:, None] * num_outputs + outputs[None, :]
        out = total.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + places, out, mask=real[:, None] & inside[None, :])


def tile_of(num_outputs: int, num_inputs: int, itemsize: int) -> tuple[int, int, int]:
    """Rows, outputs and inputs of a tile; the matrix alone decides.

    Few outputs are cut smaller, so that there are programs enough to fetch them.
    """
    outputs = 64 if num_outputs >= 8192 else 32 if num_outputs >= 2048 else 16
    columns = min(128 if itemsize == 2 else 64, max(triton.next_power_of_2(num_inputs), 16))
    return 64 if itemsize == 2 else 32, outputs, columns


@linear.register_impl(
    "triton_fixed", supported=SUPPORTED, supports=on_gpu, batch_invariant=("cuda",)
)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight.to(x.dtype).contiguous()
    (num_rows, num_inputs), num_outputs = x.shape, weight.shape[0]
    rows, outputs, columns = tile_of(num_outputs, num_inputs, x.element_size())
    out = torch.empty((num_rows, num_outputs), dtype=x.dtype, device=x.device)
    _fixed_tiles_linear_kernel[(triton.cdiv(num_outputs, outputs), triton.cdiv(num_rows, rows))](
        x,
        x.stride(0),
        weight,
        x if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        INPUTS=num_inputs,
        ROWS=rows,
        OUTPUTS=outputs,
        COLUMNS=columns,
        HAS_BIAS=bias is not None,
        WIDE=x.device.type == "cpu",
        num_warps=4,
        num_stages=3 if x.element_size() == 2 else 1,
        **after_the_last(x.device),
    )
    return out
