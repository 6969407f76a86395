# SPDX-License-Identifier: Apache-2.0
"""Oracle: the values of GGUF blocks as the package `gguf` expands them, in numpy.

`python -m oracles.gguf_dequant JOB OUT`; oracles/op_job.py says what JOB and OUT are.
"""

from __future__ import annotations

import importlib.metadata
import sys
from typing import Literal

import torch

from oracles.op_job import Oracle, Tensors, main

VERSION = "0.19.0"
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def available() -> Literal[True] | str:
    """True, or why nothing can be expanded in this process."""
    try:
        found = importlib.metadata.version("gguf")
    except importlib.metadata.PackageNotFoundError:
        return "the package gguf is not installed here; `nox -s oracle` makes its environment"
    return True if found == VERSION else f"gguf is {found}, goldens are of {VERSION}"


ORACLE = Oracle("gguf_dequant", VERSION, available)


@ORACLE.lane("dequantize_gguf", "gguf-py", "gguf.quants.dequantize")
def dequantize_gguf(data: torch.Tensor, qtype: int, dtype: str) -> Tensors:
    """The float32 values, rounded to `dtype` once."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    values = dequantize(data.numpy(), GGMLQuantizationType(qtype))
    return {"out": torch.from_numpy(values.copy()).to(DTYPES[dtype])}


if __name__ == "__main__":
    sys.exit(main(ORACLE))
