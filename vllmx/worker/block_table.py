# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/block_table.py @ v0.25.0
"""Which blocks of the cache hold each request's tokens, one table a KV cache group."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.worker.buffer_utils import StagedWriteTensor, to_device


class BlockTables:
    """Tables int32 [max_num_reqs, max blocks of a request], by group."""

    def __init__(
        self, block_sizes: list[int], max_num_reqs: int, max_model_len: int, device: str
    ) -> None:
        self.block_sizes = block_sizes
        self.device = device
        self.tables = [
            StagedWriteTensor((max_num_reqs, -(-max_model_len // size)), torch.int32, device)
            for size in block_sizes
        ]
        self.num_blocks = np.zeros((len(block_sizes), max_num_reqs), dtype=np.int64)

    def append_block_ids(
        self, row: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Add blocks to a request's tables, or replace what they held."""
        for group, block_ids in enumerate(new_block_ids):
            start = 0 if overwrite else int(self.num_blocks[group, row])
            self.tables[group].stage_write(row, start, block_ids)
            self.num_blocks[group, row] = start + len(block_ids)

    def reset(self) -> None:
        """Forget what all requests were given; the tables stay where they are."""
        for table in self.tables:
            table.clear()
        self.num_blocks[:] = 0

    def gather_block_tables(self, idx_mapping: Tensor, max_seq_len: int) -> list[Tensor]:
        """The batch's rows of each table, int32 [num_reqs, blocks that max_seq_len needs]."""
        return [
            table.gpu[:, : -(-max_seq_len // size)].index_select(0, idx_mapping)
            for table, size in zip(self.tables, self.block_sizes, strict=True)
        ]

    def compute_slot_mappings(self, rows: np.ndarray, positions: np.ndarray) -> list[Tensor]:
        """Slot of each token in each group, int64 [num_tokens]; rows, positions: [num_tokens]."""
        slots = []
        for table, size in zip(self.tables, self.block_sizes, strict=True):
            blocks = table.np[rows, positions // size].astype(np.int64)
            slots.append(to_device(blocks * size + positions % size, self.device))
        return slots
