# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_manager.py @ v0.25.0
"""What the scheduler sees of the KV cache: slots for a request's tokens, and prefix hits."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

from vllmx.core.encoder_attention import CrossAttentionSpec
from vllmx.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllmx.core.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    cdiv,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllmx.core.kv_events import BlockStored, KVCacheEvent
from vllmx.core.single_type_kv_cache_manager import FullAttentionManager
from vllmx.metrics.stats import PrefixCacheStats
from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector

logger = logging.getLogger(__name__)

_ADMITTED = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@dataclass(slots=True)
class KVCacheBlocks:
    """Blocks handed to the scheduler, `blocks[i][j]` being block j of group i."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        """These blocks followed by `other`'s, group by group."""
        return KVCacheBlocks(
            tuple([*a, *b] for a, b in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: Literal[True] = True) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Block ids, a list for each group; None for no blocks at all if that is allowed."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([[block.block_id for block in group] for group in self.blocks])

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a prefix-cache key, of the only group."""
        assert len(self.blocks) == 1, "Only one group is supported"
        return [block.block_id for block in self.blocks[0] if block.block_hash is None]

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """Ids of the blocks without a prefix-cache key, null blocks left out."""
        return [
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        ]

    def new_empty(self) -> KVCacheBlocks:
        """No blocks, in as many groups."""
        return KVCacheBlocks(((),) * len(self.blocks))


class KVCacheManager:
    """Hands out blocks of the KV cache to requests and finds cached prefixes.

    `max_num_batched_tokens` bounds what a windowed request holds at once (None: no bound).
    `watermark` is the share of the blocks that an admission leaves free. `retention_interval` is
    explained in `KVCacheCoordinator`.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        scheduler_block_size: int,
        hash_block_size: int,
        max_num_batched_tokens: int | None = None,
        enable_caching: bool = True,
        use_eagle: bool = False,
        log_stats: bool = False,
        enable_kv_cache_events: bool = False,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        metrics_collector: KVCacheMetricsCollector | None = None,
        watermark: float = 0.0,
        retention_interval: int | None = None,
    ) -> None:
        assert watermark >= 0.0, "watermark must be non-negative"
        if max_num_batched_tokens is None:
            max_num_batched_tokens = max_model_len
        groups = kv_cache_config.kv_cache_groups
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.use_eagle = use_eagle
        self.log_stats = log_stats
        self.metrics_collector = metrics_collector
        self.prefix_cache_stats = PrefixCacheStats() if log_stats else None
        self.coordinator = get_kv_cache_coordinator(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            use_eagle=use_eagle,
            enable_caching=enable_caching,
            enable_kv_cache_events=enable_kv_cache_events,
            dcp_world_size=dcp_world_size,
            pcp_world_size=pcp_world_size,
            scheduler_block_size=scheduler_block_size,
            hash_block_size=hash_block_size,
            metrics_collector=metrics_collector,
            retention_interval=retention_interval,
        )
        self.num_kv_cache_groups = len(groups)
        self.block_pool = self.coordinator.block_pool
        self._unchanged_until = self.coordinator.unchanged_until
        # The manager of the only group, if it keeps every block until the request ends.
        managers = self.coordinator.single_type_managers
        only = managers[0] if len(managers) == 1 else None
        self._full_attention = only if type(only) is FullAttentionManager else None
        self.kv_cache_config = kv_cache_config
        self.watermark_blocks = int(watermark * kv_cache_config.num_blocks)
        # What a group's events say of it: kind and window.
        self.kv_cache_event_metadata = tuple(
            (
                get_kv_cache_spec_kind(group.kv_cache_spec).value,
                get_kv_cache_spec_sliding_window(group.kv_cache_spec),
            )
            for group in groups
        )
        # The one object for "no blocks"; of tuples, so that nobody can add to it.
        self.empty_kv_cache_blocks = KVCacheBlocks(((),) * len(groups))

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0.0 to 1.0."""
        return self.block_pool.get_usage()

    def make_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Prefix-cache counts since the last call; None unless statistics are kept."""
        stats = self.prefix_cache_stats
        if stats is not None:
            self.prefix_cache_stats = PrefixCacheStats()
        return stats

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """The longest cached prefix of the request: its full blocks and its length in tokens.

        At least the last token is left to compute, as its logits are needed. Nothing holds the
        blocks yet: they are good until the next allocation, so look up again in a later step.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        blocks, num_hits = self.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.record(
                num_tokens=request.num_tokens,
                num_hits=num_hits,
                preempted=request.num_preemptions > 0,
            )
        return self.create_kv_cache_blocks(blocks), num_hits

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Give the request slots for `num_new_tokens` more tokens; None if blocks are lacking.

        Its tokens are, in this order: `request.num_computed_tokens`; `num_new_computed_tokens`
        just hit in `new_computed_blocks`; `num_external_computed_tokens` whose entries come from
        outside; the new ones; `num_lookahead_tokens` that a drafter will fill. Returns the blocks
        taken, prefix hits not among them.

        `full_sequence_must_fit` refuses unless all of the request's tokens would fit, so that a
        long prompt is not admitted by its first chunk. `reserved_blocks` are left free. The
        watermark is left free too when a waiting request is admitted while others run
        (`has_scheduled_reqs`). `delay_cache_blocks` leaves it to the caller to cache the blocks,
        once they hold their entries. `num_encoder_tokens` are the encoder positions that the
        request's first step writes for its cross attention.
        """
        if (
            num_new_tokens > 0
            and new_computed_blocks is None
            and not (num_external_computed_tokens or full_sequence_must_fit or reserved_blocks)
            and (self.watermark_blocks == 0 or request.status not in _ADMITTED)
            and (unchanged_until := self._unchanged_until.get(request.request_id))
        ):
            # Most steps of a running request change nothing: its last block has room, no block is
            # completed and none leaves a window.
            num_slots = request.num_computed_tokens + num_new_tokens + num_lookahead_tokens
            if num_slots <= unchanged_until:
                return self.empty_kv_cache_blocks
            if self._full_attention is not None and not delay_cache_blocks:
                return self._extend_running(
                    self._full_attention, request, num_new_tokens, num_lookahead_tokens
                )

        if num_new_tokens == 0 and num_external_computed_tokens == 0:
            raise ValueError(
                "num_new_tokens must be greater than 0 when there are no external computed tokens"
            )
        coordinator = self.coordinator
        request_id = request.request_id
        hits = self.empty_kv_cache_blocks.blocks
        if new_computed_blocks is not None:
            hits = new_computed_blocks.blocks
        num_local = request.num_computed_tokens + num_new_computed_tokens
        num_computed = min(num_local + num_external_computed_tokens, self.max_model_len)
        watermark = 0
        if has_scheduled_reqs and request.status in _ADMITTED:
            watermark = self.watermark_blocks

        if full_sequence_must_fit:
            num_full = min(request.num_tokens, self.max_model_len)
            num_blocks = coordinator.get_num_blocks_to_allocate(
                request_id, num_full, hits, num_encoder_tokens, num_computed, num_full, True
            )
            if num_blocks + watermark > self.block_pool.get_num_free_blocks():
                return None
        num_main = num_computed + num_new_tokens
        num_slots = min(num_main + num_lookahead_tokens, self.max_model_len)
        # Done even if the request can't be scheduled, and before new blocks are taken, so that
        # fewer cached ones are evicted.
        coordinator.remove_skipped_blocks(request_id, num_computed, request.num_prompt_tokens)
        num_blocks = coordinator.get_num_blocks_to_allocate(
            request_id,
            num_slots,
            hits,
            num_encoder_tokens,
            num_local + num_external_computed_tokens,
            num_main,
        )
        free_blocks = self.block_pool.get_num_free_blocks() - reserved_blocks
        if num_blocks + watermark > free_blocks:
            return None

        if hits is not self.empty_kv_cache_blocks.blocks or num_external_computed_tokens > 0:
            coordinator.allocate_new_computed_blocks(
                request_id, hits, num_local, num_external_computed_tokens
            )
        new_blocks = coordinator.allocate_new_blocks(
            request_id, num_slots, num_main, num_encoder_tokens
        )
        num_to_cache = None
        if self.enable_caching and not delay_cache_blocks:
            # Drafted tokens may be rejected, so only those the request has count.
            num_to_cache = min(num_main, request.num_tokens)
            coordinator.cache_blocks(request, num_to_cache)
        coordinator.note_unchanged(request_id, num_computed, num_to_cache)
        return self.create_kv_cache_blocks(new_blocks)

    def _extend_running(
        self,
        manager: FullAttentionManager,
        request: Request,
        num_new_tokens: int,
        num_lookahead_tokens: int,
    ) -> KVCacheBlocks | None:
        """`allocate_slots` of a request that has run before, where the one group keeps every block.

        What is left of the general way when there are no hits, no windows and no other groups:
        every sequence comes by twice a block, and it takes less than half the time.
        """
        request_id = request.request_id
        num_main = request.num_computed_tokens + num_new_tokens
        num_slots = min(num_main + num_lookahead_tokens, self.max_model_len)
        num_held = len(manager.req_to_blocks[request_id])
        num_blocks = cdiv(num_slots, manager.block_size) - num_held
        new_blocks = self.empty_kv_cache_blocks
        if num_blocks > 0:
            if num_blocks > self.block_pool.get_num_free_blocks():
                return None
            num_held += num_blocks
            new_blocks = KVCacheBlocks(
                (manager.allocate_new_blocks(request_id, num_slots, num_main),)
            )
        num_to_cache = None
        if self.enable_caching:
            num_to_cache = min(num_main, request.num_tokens)
            manager.cache_blocks(request, num_to_cache)
        until = self.coordinator.cached_until(num_to_cache)
        self._unchanged_until[request_id] = min(until, num_held * manager.block_size)
        return new_blocks

    def free(self, request: Request) -> None:
        """Give the request's blocks back; its tail is evicted first."""
        self.coordinator.free(request.request_id)

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give back the blocks that no token after `total_computed_tokens` attends to."""
        self.coordinator.remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)

    def pop_blocks_for_free(self, request: Request) -> list[KVCacheBlock]:
        """Forget the request but keep its blocks used.

        For blocks that a step in flight still writes to: the caller frees them later, last one
        first, through the block pool.
        """
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop blocks from the prefix cache."""
        self.block_pool.evict_blocks(block_ids)

    def evict_uncomputed_blocks(self, request: Request) -> None:
        """Drop the request's blocks after its computed tokens from the prefix cache.

        For a step that was scheduled and is taken back: `allocate_slots` has let its blocks be
        found, but nothing will be written to them.
        """
        for manager in self.coordinator.single_type_managers:
            table = manager.req_to_blocks.get(request.request_id, [])
            first = request.num_computed_tokens // manager.block_size
            self.evict_blocks({block.block_id for block in table[first:] if not block.is_null})

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; does nothing and returns False while a block is in use."""
        if not self.block_pool.reset_prefix_cache():
            return False
        if self.prefix_cache_stats is not None:
            self.prefix_cache_stats.reset = True
        return True

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """For each group, the first blocks of a running request that all requests share.

        Requests that hold blocks without being scheduled count too, so the number may be too
        small, never too large.
        """
        return self.coordinator.get_num_common_prefix_blocks(running_request_id)

    def take_events(self) -> list[KVCacheEvent]:
        """What happened to the prefix cache since the last call, with each group's kind."""
        events = self.block_pool.take_events()
        for event in events:
            if isinstance(event, BlockStored) and event.group_idx is not None:
                if not 0 <= event.group_idx < len(self.kv_cache_event_metadata):
                    logger.warning("Group index `%s` not in KV cache metadata", event.group_idx)
                    continue
                kind, window = self.kv_cache_event_metadata[event.group_idx]
                event.kv_cache_spec_kind = kind
                event.kv_cache_spec_sliding_window = window
        return events

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The request's block tables."""
        return self.create_kv_cache_blocks(self.coordinator.get_blocks(request_id))

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block tables as ids."""
        return self.get_blocks(request_id).get_block_ids()

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """The request's block tables, those of attention cut after `num_computed_tokens`."""
        tables = []
        groups = self.kv_cache_config.kv_cache_groups
        for group, ids in zip(groups, self.get_block_ids(request_id), strict=True):
            spec = group.kv_cache_spec
            if isinstance(spec, AttentionSpec) and not isinstance(spec, CrossAttentionSpec):
                ids = ids[: cdiv(num_computed_tokens, spec.block_size)]
            tables.append(ids)
        return tuple(tables)

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let the full blocks among the first `num_computed_tokens` tokens be found."""
        if self.enable_caching:
            self.coordinator.cache_blocks(request, num_computed_tokens)

    def create_kv_cache_blocks(self, blocks: tuple[list[KVCacheBlock], ...]) -> KVCacheBlocks:
        """`blocks` for the scheduler; the shared empty object if there are none."""
        return KVCacheBlocks(blocks) if any(blocks) else self.empty_kv_cache_blocks

    def take_new_block_ids(self) -> list[int]:
        """Attention blocks taken since the last call that must be cleared before use.

        None are recorded unless `KVCacheConfig.needs_kv_cache_zeroing`.
        """
        ids: list[int] = []
        for manager in self.coordinator.single_type_managers:
            ids.extend(manager.take_new_block_ids())
        return ids

    def new_step_starts(self) -> None:
        """Called before each step."""
        self.coordinator.new_step_starts()
