# SPDX-License-Identifier: Apache-2.0
"""Oracle: the Gumbel noise of a seed, drawn by Triton's own Philox in Triton's interpreter.

`python -m oracles.triton_noise JOB OUT`. Upstream's sampler is a Triton kernel that the CPU build
lacks; what it draws is fixed by `tl.randint` and `tl.rand`, which run here without a GPU. The
kernel below is ours, written from the definition of the draw.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Literal

import torch

from oracles.op_job import Oracle, Tensors, main


def available() -> Literal[True] | str:
    """True, or why nothing can be drawn in this process."""
    try:
        importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return "the package triton is not installed here; vllmx's test environment has it"
    return True


def _version() -> str:
    return importlib.metadata.version("triton") if available() is True else ""


ORACLE = Oracle("triton_noise", _version(), available)
CALLABLE = "triton.language.rand(randint(seed, position), token)"

if available() is True:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    import triton
    import triton.language as tl

    @triton.jit
    def _noise_kernel(out_ptr, seeds_ptr, positions_ptr, count, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202
        row = tl.program_id(0)
        key = tl.randint(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        token = tl.arange(0, BLOCK)
        uniform = tl.maximum(tl.rand(key, token), 4.6566127342e-10)
        tl.store(out_ptr + row * count + token, uniform, mask=token < count)


def _noise(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Noise of every token, float64 [n, count], of the uniforms that Triton draws in float32."""
    uniform = torch.empty(len(seeds), count)
    block = triton.next_power_of_2(count)
    _noise_kernel[(len(seeds),)](uniform, seeds, positions, count, BLOCK=block)
    return -torch.log(-torch.log1p(-uniform.double()))


@ORACLE.lane("gumbel_noise", "triton-interpreter", CALLABLE)
def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> Tensors:
    """The noise in float32."""
    return {"out": _noise(seeds, positions, count).float()}


@ORACLE.lane("seeded_token", "triton-interpreter", CALLABLE)
def seeded_token(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> Tensors:
    """The largest of logits and noise; of the logits alone at temperature 0."""
    noise = _noise(seeds, positions, logits.shape[1])
    noise[temperature == 0] = 0.0
    return {"token": (logits.double() + noise).argmax(dim=1)}


if __name__ == "__main__":
    sys.exit(main(ORACLE))
