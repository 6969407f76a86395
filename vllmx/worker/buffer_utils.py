# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/buffer_utils.py @ v0.25.0
"""Tensors that the host writes and the device reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from vllmx.kernels.triton_input import copy_packet


class StagedWriteTensor:
    """A table of rows kept on the device, written on the host in pieces.

    `np` is the host's copy and `gpu` the device's; on a CPU they share memory, and writing is
    all there is to it. On a GPU the pieces written since the last `take_staged` still have to be
    sent.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
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

    def take_staged(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Places in the flat table, int32, and their values, not sent so far; None without any."""
        staged = self._staged
        if not staged:
            return None
        width = self.np.shape[1]
        places = np.concatenate(
            [np.arange(row * width + start, row * width + end) for row, start, end in staged]
        )
        values = np.concatenate([self.np[row, start:end] for row, start, end in staged])
        staged.clear()
        return places.astype(np.int32), values

    def clear(self) -> None:
        """Forget what was staged."""
        self._staged.clear()


class PackedBuffer:
    """int32 arrays that go to the device in one copy, and lie at the same places each time.

    The host's side is a ring: a copy may still be under way when the next one is being written.
    """

    DEPTH = 4
    """More than the steps that may be under way at once."""

    def __init__(self, size: int, device: str) -> None:
        self._on_gpu = on_gpu = device != "cpu"
        self._ring = torch.zeros((self.DEPTH, size), dtype=torch.int32, pin_memory=on_gpu)
        self._ring_np = self._ring.numpy()
        self._turn = 0
        self.gpu = torch.zeros(size, dtype=torch.int32, device=device)
        self.size = size

    @property
    def turn(self) -> int:
        """Which of the ring's buffers is being written, below DEPTH."""
        return self._turn

    def next(self) -> np.ndarray:
        """Turn to the ring's next buffer, int32 [size], whose old contents are of no use."""
        self._turn = (self._turn + 1) % self.DEPTH
        return self._ring_np[self._turn]

    def send(self, used: int) -> None:
        """Copy the first `used` numbers to the device; the host does not wait."""
        packet = self._ring[self._turn, :used]
        if self._on_gpu:
            copy_packet(self.gpu, packet)
        else:
            self.gpu[:used].copy_(packet)


def to_device(array: np.ndarray, device: str) -> Tensor:
    """A host array as a tensor on `device`; on a CPU it is the same memory."""
    tensor = torch.from_numpy(array)
    return tensor if device == "cpu" else tensor.to(device, non_blocking=True)
