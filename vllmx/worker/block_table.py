# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/block_table.py @ v0.25.0
"""Which blocks of the cache hold each request's tokens, one table a KV cache group."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.worker.buffer_utils import StagedWriteTensor, to_device
from vllmx.worker.input_batch import InputBatch


class BlockTables:
    """Tables int32 [max_num_reqs, max blocks of a request], by group."""

    state_groups: frozenset[int] = frozenset()
    """Groups whose blocks hold recurrent states."""

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

    def gather_block_tables(self, batch: InputBatch) -> list[Tensor]:
        """The batch's rows of each table, int32 [num_reqs, blocks that its longest needs]."""
        max_seq_len = int(batch.seq_lens_np.max())
        return [
            table.gpu[:, : -(-max_seq_len // size)].index_select(0, batch.idx_mapping)
            for table, size in zip(self.tables, self.block_sizes, strict=True)
        ]

    def compute_slot_mappings(self, batch: InputBatch) -> list[Tensor]:
        """Slot of each token in each group, int64 [num_tokens]."""
        rows, positions = batch.token_rows, batch.positions_np
        assert rows is not None and positions is not None
        slots = []
        for table, size in zip(self.tables, self.block_sizes, strict=True):
            blocks = table.np[rows, positions // size].astype(np.int64)
            slots.append(to_device(blocks * size + positions % size, self.device))
        return slots


class HybridBlockTables(BlockTables):
    """Tables of a model with recurrent layers, whose groups are `state_groups`.

    A request's states are in the block of its table that its last token falls in. Where one block
    is kept, it is of max_model_len tokens and so the first.
    """

    def __init__(
        self,
        block_sizes: list[int],
        max_num_reqs: int,
        max_model_len: int,
        device: str,
        state_groups: frozenset[int],
    ) -> None:
        super().__init__(block_sizes, max_num_reqs, max_model_len, device)
        self.state_groups = state_groups
        self._no_slots = torch.empty(0, dtype=torch.int64, device=self.device)

    def gather_block_tables(self, batch: InputBatch) -> list[Tensor]:
        """As for attention; of groups with states the one block, int32 [num_reqs, 1]."""
        max_seq_len = int(batch.seq_lens_np.max())
        gathered = []
        for group, (table, size) in enumerate(zip(self.tables, self.block_sizes, strict=True)):
            if group in self.state_groups:
                blocks = self.state_blocks(group, batch.idx_mapping_np, batch.seq_lens_np)
                gathered.append(to_device(blocks[:, None], self.device))
            else:
                columns = table.gpu[:, : -(-max_seq_len // size)]
                gathered.append(columns.index_select(0, batch.idx_mapping))
        return gathered

    def compute_slot_mappings(self, batch: InputBatch) -> list[Tensor]:
        """As for attention; states have no slots."""
        rows, positions = batch.token_rows, batch.positions_np
        assert rows is not None and positions is not None
        slots = []
        for group, (table, size) in enumerate(zip(self.tables, self.block_sizes, strict=True)):
            if group in self.state_groups:
                slots.append(self._no_slots)
            else:
                blocks = table.np[rows, positions // size].astype(np.int64)
                slots.append(to_device(blocks * size + positions % size, self.device))
        return slots

    def state_blocks(self, group: int, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks with the states after `num_tokens` tokens of the requests in `rows`, int32."""
        return self.tables[group].np[rows, (num_tokens - 1) // self.block_sizes[group]]
