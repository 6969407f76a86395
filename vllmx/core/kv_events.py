# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_events.py @ v0.25.0
"""What happened to the prefix cache, for a router that wants to know what is cached where."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

import msgspec

from vllmx.core.block_hash import ExternalBlockHash

MEDIUM_GPU = "GPU"


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Base of the events; encoded as a map with the class name under `type`."""


class BlockStored(KVCacheEvent):
    """Blocks that can be found from now on, one behind the other."""

    block_hashes: list[ExternalBlockHash]
    parent_block_hash: ExternalBlockHash | None
    """Hash of the block before the first one."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    """For each block, what its hash covers besides tokens."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def __hash__(self) -> int:
        return hash(
            (
                tuple(self.block_hashes),
                self.parent_block_hash,
                tuple(self.token_ids),
                self.block_size,
                self.lora_id,
                self.medium,
                tuple(self.extra_keys) if self.extra_keys else None,
                self.group_idx,
                self.kv_cache_spec_kind,
                self.kv_cache_spec_sliding_window,
            )
        )


class BlockRemoved(KVCacheEvent):
    """Blocks that cannot be found any more."""

    block_hashes: list[ExternalBlockHash]
    medium: str | None
    group_idx: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.block_hashes), self.medium, self.group_idx))


class AllBlocksCleared(KVCacheEvent):
    """The prefix cache was emptied."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events that are published together, with the wall clock's seconds."""

    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class KVEventBatch(EventBatch):
    """Events of the prefix cache."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class KVEventAggregator:
    """Counts the events of several workers, to tell those that all of them had."""

    __slots__ = ("_event_counter", "_num_workers")

    def __init__(self, num_workers: int) -> None:
        if num_workers <= 0:
            raise ValueError("num_workers must be greater than zero.")
        self._event_counter: Counter[KVCacheEvent] = Counter()
        self._num_workers = num_workers

    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Count the events of a worker."""
        if not isinstance(events, list):
            raise TypeError("events must be a list of KVCacheEvent.")
        self._event_counter.update(events)

    def get_common_events(self) -> list[KVCacheEvent]:
        """The events that every worker had."""
        counts = self._event_counter.items()
        return [event for event, count in counts if count == self._num_workers]

    def get_all_events(self) -> list[KVCacheEvent]:
        """The events of all workers, as often as they were had."""
        return list(self._event_counter.elements())

    def clear_events(self) -> None:
        """Forget all events."""
        self._event_counter.clear()

    def increment_workers(self, count: int = 1) -> None:
        """Wait for `count` more workers."""
        if count <= 0:
            raise ValueError("count must be positive.")
        self._num_workers += count

    def reset_workers(self) -> None:
        """Wait for one worker."""
        self._num_workers = 1

    def get_number_of_workers(self) -> int:
        """Number of workers that are waited for."""
        return self._num_workers

    def __repr__(self) -> str:
        return f"<KVEventAggregator workers={self._num_workers}, events={len(self._event_counter)}>"


class KVConnectorKVEvents(ABC):
    """Base of what a worker's KV connector reports of its own cache."""

    @abstractmethod
    def add_events(self, events: list[KVCacheEvent]) -> None:
        """Add the events of a worker."""

    @abstractmethod
    def aggregate(self) -> KVConnectorKVEvents:
        """Reduce the events of all workers to those that all had."""

    @abstractmethod
    def increment_workers(self, count: int = 1) -> None:
        """Count `count` more workers."""

    @abstractmethod
    def get_all_events(self) -> list[KVCacheEvent]:
        """The events of all workers."""

    @abstractmethod
    def get_number_of_workers(self) -> int:
        """Number of workers whose events are in."""

    @abstractmethod
    def clear_events(self) -> None:
        """Forget all events."""

    def merge(self, other: KVConnectorKVEvents) -> KVConnectorKVEvents:
        """Add the events of `other`."""
        self.add_events(other.get_all_events())
        return self
