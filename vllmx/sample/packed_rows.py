# SPDX-License-Identifier: Apache-2.0
"""What requests ask for in lists of different length, laid end to end for a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass
class Packed:
    """places: int64 [m], the row of the batch that each entry belongs to; columns: int64 [m], which
    entry of its row it is; values: [m, ...]; width: entries of the longest row."""

    places: Tensor
    columns: Tensor
    values: Tensor
    width: int


class PackedRows:
    """An array for some of the rows. The packing of a batch is kept until the batch changes, so
    that a step costs no loop over requests and no copy to the device."""

    def __init__(self, max_num_reqs: int, device: str) -> None:
        self.device = device
        self.active = np.zeros(max_num_reqs, dtype=np.bool_)
        self.arrays: dict[int, np.ndarray] = {}
        self._key: bytes | None = None
        self._packed: Packed | None = None

    def set(self, row: int, array: np.ndarray | None) -> None:
        """Give `row` its array [entries, ...]; None or an empty one for a request without.

        Arrays of two dimensions may differ in the second too: they are filled up on the left.
        """
        had = self.active[row]
        self.active[row] = array is not None and len(array) > 0
        self.arrays.pop(row, None)
        if self.active[row]:
            assert array is not None
            self.arrays[row] = array
        if had or self.active[row]:
            self._key = None

    def pack(self, rows: np.ndarray, fill: int = 0) -> Packed | None:
        """The entries of a batch of rows, in its order; None if no row has any.

        fill: what is put before the shorter arrays of two dimensions.
        """
        active = self.active[rows]
        if not active.any():
            return None
        key = rows.tobytes()
        if key == self._key:
            return self._packed
        places = np.flatnonzero(active)
        arrays = [self.arrays[row] for row in rows[places].tolist()]
        lengths = np.array([len(array) for array in arrays])
        if arrays[0].ndim == 2:
            widest = max(array.shape[1] for array in arrays)
            arrays = [
                np.pad(array, ((0, 0), (widest - array.shape[1], 0)), constant_values=fill)
                for array in arrays
            ]
        columns = np.concatenate([np.arange(length) for length in lengths])
        self._packed = Packed(
            self._to_device(np.repeat(places, lengths)),
            self._to_device(columns),
            self._to_device(np.concatenate(arrays)),
            int(lengths.max()),
        )
        self._key = key
        return self._packed

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device, non_blocking=True)
