# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/model_states/mamba_hybrid.py @ v0.25.0
"""What a runner does before a step of a model with recurrent layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vllmx.core.kv_cache_interface import KVCacheConfig, MambaSpec
from vllmx.kernels.triton_states import copy_states

if TYPE_CHECKING:
    from vllmx.worker.block_table import HybridBlockTables
    from vllmx.worker.input_batch import HostBatch, InputBatch


class MambaHybridModelState:
    """Moves states along the block tables.

    A request's running states are in the block of its last token. Where prefixes are cached
    (mode "align"), the block it leaves keeps the states at its end, which other requests may hit,
    so they are copied to the next block before they change. Which blocks those are, the host knows
    without asking the device.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        pages: dict[str, Tensor],
        block_tables: HybridBlockTables,
        device: str,
    ) -> None:
        """`pages`: of each recurrent layer, uint8 [num_blocks, bytes of its states]."""
        self.block_tables = block_tables
        self.device = device
        groups = kv_cache_config.kv_cache_groups
        self.groups = sorted(block_tables.state_groups)
        specs = [s for g in groups if isinstance(s := g.kv_cache_spec, MambaSpec)]
        (self.block_size,) = {spec.block_size for spec in specs}
        self.copies: StateCopies | None = None
        if specs[0].mamba_cache_mode == "align":
            by_group = [[pages[name] for name in groups[g].layer_names] for g in self.groups]
            self.copies = StateCopies(by_group) if device == "cpu" else FusedStateCopies(by_group)

    @staticmethod
    def has_fresh(batch: HostBatch) -> bool:
        """Whether a request of one token has no state yet, which the layers must not read; a
        CUDA graph reads the states of all its requests."""
        return bool((batch.seq_lens_np == 1).any())

    def preprocess_state(self, batch: InputBatch | HostBatch) -> None:
        """Copy the states of requests that go on in another block than they ended in."""
        if self.copies is None:
            return
        lengths = batch.seq_lens_np
        computed = lengths - batch.num_scheduled_tokens
        moves = (computed - 1) // self.block_size != (lengths - 1) // self.block_size
        requests = np.flatnonzero(moves & (computed > 0))
        if len(requests) == 0:
            return
        rows = batch.idx_mapping_np[requests]
        ends = (computed[requests], lengths[requests])
        blocks = [
            [self.block_tables.state_blocks(group, rows, end) for end in ends]
            for group in self.groups
        ]
        self.copies(np.array(blocks, dtype=np.int32))


class StateCopies:
    """Copies the states of all layers from block to block, with torch's operations."""

    def __init__(self, pages: list[list[Tensor]]) -> None:
        """`pages`: for each group those of its layers, uint8 [num_blocks, bytes of the states]."""
        self.pages = pages

    def __call__(self, blocks: np.ndarray) -> None:
        """blocks: int32 [groups, 2, copies], from where and to where."""
        for ends, layers in zip(torch.from_numpy(blocks).long(), self.pages, strict=True):
            source, target = ends
            for pages in layers:
                pages.index_copy_(0, target, pages.index_select(0, source))


class FusedStateCopies(StateCopies):
    """The same in one kernel; the host does not wait."""

    def __init__(self, pages: list[list[Tensor]]) -> None:
        super().__init__(pages)
        layers = [page for group in pages for page in group]
        self.device = layers[0].device
        strides, widths = {p.stride(0) for p in layers}, {p.shape[1] for p in layers}
        assert len(strides) == 1 and max(strides) % 4 == 0, f"pages of states are {strides} bytes"
        # In 32-bit numbers: from page to page, and what a page holds.
        self.page_stride, self.count = max(strides) // 4, -(-max(widths) // 4)
        self.addresses = torch.tensor([p.data_ptr() for p in layers], device=self.device)
        places = [place for place, group in enumerate(pages) for _ in group]
        self.groups = torch.tensor(places, dtype=torch.int32, device=self.device)

    def __call__(self, blocks: np.ndarray) -> None:
        """blocks: int32 [groups, 2, copies], from where and to where."""
        sent = torch.from_numpy(blocks)
        if self.device.type != "cpu":
            sent = sent.pin_memory().to(self.device, non_blocking=True)
        copy_states(self.addresses, self.groups, sent, self.page_stride, self.count)
