# SPDX-License-Identifier: Apache-2.0
"""Gumbel noise drawn by Triton's own Philox, written from the definition."""

import triton
import triton.language as tl


@triton.jit
def noise_kernel(out_ptr, seed, position, N: tl.constexpr):
    block = tl.arange(0, N)
    key = tl.randint(seed, position)
    uniform = tl.maximum(tl.rand(key, block), 4.6566127342e-10)
    tl.store(out_ptr + block, -tl.log(-tl.log(1.0 - uniform)))
