# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/buffer_utils.py @ v0.25.0
"""Tensors that the host writes and the device reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class StagedWriteTensor:
    """A table of rows kept on the device, written on the host in pieces.

    `np` is the host's copy and `gpu` the device's; on a CPU they share memory, and writing is
    all there is to it. On a GPU `apply_write` sends the pieces written since the last call.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
        on_gpu = device != "cpu"
        # numpy's zeros are pages that cost nothing until they are touched; torch's are written.
        numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self.np: np.ndarray = np.zeros(shape, dtype=numpy_dtype)
        self.cpu: Tensor = torch.from_numpy(self.np)
        self.gpu: Tensor = torch.zeros(shape, dtype=dtype, device=device) if on_gpu else self.cpu
        self._staged: list[tuple[int, int, int]] = []
        self._on_gpu = on_gpu

    def stage_write(self, row: int, start: int, values: Sequence[int]) -> None:
        """Write `values` into `row` from column `start` on."""
        end = start + len(values)
        self.np[row, start:end] = values
        if self._on_gpu:
            self._staged.append((row, start, end))

    def apply_write(self) -> None:
        """Bring the device's copy up to date."""
        for row, start, end in self._staged:
            self.gpu[row, start:end].copy_(self.cpu[row, start:end], non_blocking=True)
        self._staged.clear()


def to_device(array: np.ndarray, device: str) -> Tensor:
    """A host array as a tensor on `device`; on a CPU it is the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.to(device, non_blocking=True)
