# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_metrics.py @ v0.25.0
"""How long cached blocks live and how often they are used again, from a sample of them."""

from __future__ import annotations

import random
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING

from vllmx.metrics.stats import KVCacheEvictionEvent

if TYPE_CHECKING:
    from vllmx.core.kv_cache_block import KVCacheBlock


class BlockMetricsState:
    """Times of one sampled block, in nanoseconds of the monotonic clock."""

    def __init__(self) -> None:
        self.birth_time_ns = time.monotonic_ns()
        self.last_access_ns = self.birth_time_ns
        self.access_history: deque[int] = deque(maxlen=4)

    def record_access(self) -> None:
        """Note that a request hit the block now."""
        self.last_access_ns = time.monotonic_ns()
        self.access_history.append(self.last_access_ns)

    def get_lifetime_seconds(self) -> float:
        """Seconds since the block was allocated."""
        return (time.monotonic_ns() - self.birth_time_ns) / 1e9

    def get_idle_time_seconds(self) -> float:
        """Seconds since the block was last used."""
        return (time.monotonic_ns() - self.last_access_ns) / 1e9

    def get_reuse_gaps_seconds(self) -> list[float]:
        """Seconds between the most recent uses."""
        return [(after - before) / 1e9 for before, after in pairwise(self.access_history)]


class KVCacheMetricsCollector:
    """Follows a share of the blocks from allocation to eviction."""

    def __init__(self, sample_rate: float = 0.01) -> None:
        assert 0 < sample_rate <= 1.0, f"sample_rate must be in (0, 1.0], got {sample_rate}"
        self.sample_rate = sample_rate
        self.block_metrics: dict[int, BlockMetricsState] = {}
        self._eviction_events: list[KVCacheEvictionEvent] = []

    def should_sample_block(self) -> bool:
        """Draw whether to follow a block."""
        return random.random() < self.sample_rate

    def on_block_allocated(self, block: KVCacheBlock) -> None:
        """Maybe begin to follow `block`."""
        if self.should_sample_block():
            self.block_metrics[block.block_id] = BlockMetricsState()

    def on_block_accessed(self, block: KVCacheBlock) -> None:
        """Note a prefix hit on `block`."""
        if metrics := self.block_metrics.get(block.block_id):
            metrics.record_access()

    def on_block_evicted(self, block: KVCacheBlock) -> None:
        """Turn what is known of `block` into an event."""
        metrics = self.block_metrics.pop(block.block_id, None)
        if metrics is None:
            return
        self._eviction_events.append(
            KVCacheEvictionEvent(
                lifetime_seconds=metrics.get_lifetime_seconds(),
                idle_seconds=metrics.get_idle_time_seconds(),
                reuse_gaps_seconds=tuple(metrics.get_reuse_gaps_seconds()),
            )
        )

    def reset(self) -> None:
        """Forget all blocks and events."""
        self.block_metrics.clear()
        self._eviction_events.clear()

    def drain_events(self) -> list[KVCacheEvictionEvent]:
        """The events since the last call."""
        events, self._eviction_events = self._eviction_events, []
        return events
