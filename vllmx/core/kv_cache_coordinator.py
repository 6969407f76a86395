# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_coordinator.py @ v0.25.0
"""One manager for each KV cache group, and prefix hits that hold for all groups at once."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from vllmx.core.block_hash import BlockHash, BlockHashList, BlockHashListWithBlockSize
from vllmx.core.block_pool import BlockPool
from vllmx.core.encoder_attention import CrossAttentionManager, CrossAttentionSpec
from vllmx.core.full_attention_variants import (
    RSWAManager,
    RSWASpec,
    SinkFullAttentionManager,
    SinkFullAttentionSpec,
)
from vllmx.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllmx.core.mamba_manager import MambaManager
from vllmx.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllmx.request import Request


class KVCacheCoordinator(ABC):
    """The groups of a model as one: each call goes to every group's manager.

    `scheduler_block_size` is the least common multiple of the groups' block sizes, the step of
    prefix hits. `retention_interval` thins out the cached prefixes of windowed and recurrent
    groups: None keeps all, n (a multiple of `scheduler_block_size`) those that hits at multiples
    of n need, 0 those that a repeat of the prompt needs.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        max_num_batched_tokens: int,
        use_eagle: bool,
        enable_caching: bool,
        enable_kv_cache_events: bool,
        dcp_world_size: int,
        pcp_world_size: int,
        scheduler_block_size: int,
        hash_block_size: int,
        metrics_collector: KVCacheMetricsCollector | None = None,
        retention_interval: int | None = None,
    ) -> None:
        groups = kv_cache_config.kv_cache_groups
        assert scheduler_block_size % hash_block_size == 0
        assert all(scheduler_block_size % g.kv_cache_spec.block_size == 0 for g in groups)
        _validate_retention_interval(retention_interval, scheduler_block_size, kv_cache_config)
        self.kv_cache_config = kv_cache_config
        self.max_model_len = max_model_len
        self.enable_caching = enable_caching
        self.scheduler_block_size = scheduler_block_size
        self.hash_block_size = hash_block_size
        self.retention_interval = retention_interval
        self.block_pool = BlockPool(
            num_gpu_blocks=kv_cache_config.num_blocks,
            enable_caching=enable_caching,
            hash_block_size=hash_block_size,
            enable_kv_cache_events=enable_kv_cache_events,
            metrics_collector=metrics_collector,
        )
        # Groups whose hits drop the last block; all of them if none is marked.
        self.eagle_group_ids = {i for i, group in enumerate(groups) if group.is_eagle_group}
        if use_eagle and not self.eagle_group_ids:
            self.eagle_group_ids = set(range(len(groups)))
        self.single_type_managers = tuple(
            get_manager_for_kv_cache_spec(
                kv_cache_spec=group.kv_cache_spec,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                block_pool=self.block_pool,
                enable_caching=enable_caching,
                kv_cache_group_id=i,
                dcp_world_size=dcp_world_size,
                pcp_world_size=pcp_world_size,
                scheduler_block_size=scheduler_block_size,
            )
            for i, group in enumerate(groups)
        )
        if not kv_cache_config.needs_kv_cache_zeroing:
            for manager in self.single_type_managers:
                manager.records_new_blocks = False
        # Length up to which allocate_slots has nothing to do for a running request.
        self.unchanged_until: dict[str, int] = {}

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that the request takes in all groups to have `num_tokens` slots.

        `new_computed_blocks` are its prefix hits, `num_encoder_tokens` the slots that cross
        attention takes. `apply_admission_cap` counts the most that is held at once, for the
        admission of a whole sequence; a step needs it off.
        """
        num_blocks = 0
        for i, manager in enumerate(self.single_type_managers):
            if manager.counts_encoder_tokens:
                num_blocks += manager.get_num_blocks_to_allocate(
                    request_id, num_encoder_tokens, (), 0, num_encoder_tokens, apply_admission_cap
                )
                continue
            num_blocks += manager.get_num_blocks_to_allocate(
                request_id,
                num_tokens,
                new_computed_blocks[i],
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
            )
        return num_blocks

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: tuple[Sequence[KVCacheBlock], ...],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the tables of a request with its prefix hits, then with external tokens.

        Every group holds its hits before any group takes blocks, so that none is evicted.
        """
        if any(request_id in manager.num_cached_block for manager in self.single_type_managers):
            assert not any(new_computed_blocks), "a running request has no new prefix hits"
            return
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(
                request_id, blocks, num_local_computed_tokens, num_external_computed_tokens
            )
        if num_external_computed_tokens > 0:
            for manager in self.single_type_managers:
                manager.allocate_external_computed_blocks(
                    request_id, num_local_computed_tokens, num_external_computed_tokens
                )

    def allocate_new_blocks(
        self,
        request_id: str,
        num_tokens: int,
        num_tokens_main_model: int,
        num_encoder_tokens: int = 0,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Extend the request's tables to `num_tokens` slots; returns what was added.

        `num_encoder_tokens`: slots of the tables for cross attention.
        """
        return tuple(
            [
                manager.allocate_new_blocks(
                    request_id,
                    num_encoder_tokens if manager.counts_encoder_tokens else num_tokens,
                    num_tokens_main_model,
                )
                for manager in self.single_type_managers
            ]
        )

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let the full blocks among the first `num_computed_tokens` tokens be found."""
        for manager in self.single_type_managers:
            manager.cache_blocks(request, num_computed_tokens, self.retention_interval)

    def note_unchanged(
        self, request_id: str, total_computed_tokens: int, num_cached_tokens: int | None
    ) -> None:
        """Work out up to which length allocate_slots has nothing to do for the request.

        For use right after an allocation; `num_cached_tokens` is what cache_blocks was given, or
        None if it was not called.
        """
        until = self.cached_until(num_cached_tokens)
        for manager in self.single_type_managers:
            until = min(until, manager.unchanged_until(request_id, total_computed_tokens))
        self.unchanged_until[request_id] = until

    def cached_until(self, num_cached_tokens: int | None) -> int:
        """Longest length at which cache_blocks still has nothing new to cache."""
        if num_cached_tokens is None:
            return 0
        step = self.scheduler_block_size
        return (num_cached_tokens // step + 1) * step - 1

    def free(self, request_id: str) -> None:
        """Forget the request and give its blocks back."""
        self.unchanged_until.pop(request_id, None)
        for manager in self.single_type_managers:
            manager.free(request_id)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; the caller gives the blocks back, last one first."""
        self.unchanged_until.pop(request_id, None)
        blocks: list[KVCacheBlock] = []
        for manager in self.single_type_managers:
            blocks.extend(manager.pop_blocks_for_free(request_id))
        return blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """For each group, the first blocks that all requests with blocks share."""
        return [
            manager.get_num_common_prefix_blocks(running_request_id)
            for manager in self.single_type_managers
        ]

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give back the blocks that no later token attends to."""
        for manager in self.single_type_managers:
            manager.remove_skipped_blocks(request_id, total_computed_tokens, num_prompt_tokens)

    def get_blocks(self, request_id: str) -> tuple[list[KVCacheBlock], ...]:
        """The request's table in each group."""
        return tuple(
            [manager.req_to_blocks.get(request_id, []) for manager in self.single_type_managers]
        )

    @abstractmethod
    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest cached prefix of at most `max_cache_hit_length` tokens: blocks, length."""

    def new_step_starts(self) -> None:
        """Called before each step."""
        for manager in self.single_type_managers:
            manager.new_step_starts()


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Any number of groups, even none, without prefix caching."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(enable_caching=False, **kwargs)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """0 for each group: nothing is shared."""
        return [0] * len(self.single_type_managers)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """No hit."""
        return tuple([] for _ in self.single_type_managers), 0

    def cached_until(self, num_cached_tokens: int | None) -> int:
        """No end: nothing is ever cached."""
        return sys.maxsize


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """A single group."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = self.kv_cache_config.kv_cache_groups
        assert len(groups) == 1, "UnitaryKVCacheCoordinator assumes only one kv cache group"
        self.kv_cache_spec = groups[0].kv_cache_spec
        self.block_size = self.kv_cache_spec.block_size
        assert not self.enable_caching or self.hash_block_size == self.block_size, (
            "UnitaryKVCacheCoordinator assumes hash_block_size == block_size"
        )
        self.single_type_managers[0].use_eagle = 0 in self.eagle_group_ids

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest cached prefix of at most `max_cache_hit_length` tokens: blocks, length."""
        hit_blocks = self.single_type_managers[0].find_longest_cache_hit(
            block_hashes=block_hashes,
            max_length=max_cache_hit_length,
            kv_cache_group_ids=[0],
            block_pool=self.block_pool,
            kv_cache_spec=self.kv_cache_spec,
            drop_eagle_block=0 in self.eagle_group_ids,
            alignment_tokens=self.block_size,
        )
        return hit_blocks, len(hit_blocks[0]) * self.block_size

    def cached_until(self, num_cached_tokens: int | None) -> int:
        """The length before the one that fills the next block."""
        if num_cached_tokens is None:
            return 0
        return (num_cached_tokens // self.block_size + 1) * self.block_size - 1


class SpecGroup(NamedTuple):
    """Groups with one spec, looked up together; with eagle if any of them is a drafter's."""

    spec: KVCacheSpec
    group_ids: list[int]
    manager_cls: type[SingleTypeKVCacheManager]
    use_eagle: bool


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Groups of several kinds. A hit has the same length in all of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert all(
            group.kv_cache_spec.block_size % self.hash_block_size == 0
            for group in self.kv_cache_config.kv_cache_groups
        ), "block_size must be divisible by hash_block_size"
        # How much longer the last hit was in some group than in all.
        self.num_uncached_common_prefix_tokens = 0
        self.verify_and_split_kv_cache_groups()

    def verify_and_split_kv_cache_groups(self) -> None:
        """Put groups of one spec together, full attention first: it bounds a hit soonest."""
        by_spec: list[SpecGroup] = []
        for i, group in enumerate(self.kv_cache_config.kv_cache_groups):
            spec = group.kv_cache_spec
            use_eagle = i in self.eagle_group_ids
            for j, known in enumerate(by_spec):
                if known.spec == spec:
                    ids = [*known.group_ids, i]
                    by_spec[j] = known._replace(
                        group_ids=ids, use_eagle=known.use_eagle or use_eagle
                    )
                    break
            else:
                manager_cls = type(self.single_type_managers[i])
                by_spec.append(SpecGroup(spec, [i], manager_cls, use_eagle))
        assert len(by_spec) > 1, "HybridKVCacheCoordinator requires at least two attention groups."
        self.attention_groups = sorted(
            by_spec, key=lambda group: not isinstance(group.spec, FullAttentionSpec)
        )
        for known in by_spec:
            for group_id in known.group_ids:
                self.single_type_managers[group_id].use_eagle = known.use_eagle

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Let full blocks be found, up to the last length at which a hit can end.

        With eagle one block more, which the look-up matches and then drops.
        """
        aligned = num_computed_tokens // self.scheduler_block_size * self.scheduler_block_size
        for manager in self.single_type_managers:
            num_tokens = aligned
            if manager.use_eagle and aligned > 0:
                num_tokens = min(num_computed_tokens, aligned + manager.block_size)
            manager.cache_blocks(request, num_tokens, self.retention_interval)

    def cached_until(self, num_cached_tokens: int | None) -> int:
        """0, which is no answer, with eagle: each group goes on at a place of its own."""
        return 0 if self.eagle_group_ids else super().cached_until(num_cached_tokens)

    def find_longest_cache_hit(
        self, block_hashes: list[BlockHash], max_cache_hit_length: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest prefix that every group has cached: blocks, length.

        Each kind of group accepts the length or shortens it; a shorter length goes round again
        until all accept it.
        """
        tables: list[list[KVCacheBlock] | None] = [None] * len(self.single_type_managers)
        full_groups = [g for g in self.attention_groups if isinstance(g.spec, FullAttentionSpec)]
        hit_length = max_cache_hit_length
        longest = 0
        # Kinds that have dropped their eagle block for the present length, which they do once.
        dropped: set[int] = set()
        while True:
            length = hit_length
            for idx, group in enumerate(self.attention_groups):
                block_size = group.spec.block_size
                if group in full_groups and tables[group.group_ids[0]] is not None:
                    # Every prefix of its hit is a hit.
                    length = length // block_size * block_size
                    continue
                drop = group.use_eagle and idx not in dropped
                found = self._find_in_group(group, block_hashes, length, max_cache_hit_length, drop)
                found_length = len(found[0]) * block_size
                if drop:
                    dropped.add(idx)
                elif found_length < length:
                    dropped.clear()
                length = found_length
                longest = max(longest, length)
                for group_id, table in zip(group.group_ids, found, strict=True):
                    tables[group_id] = table
            if length >= hit_length:
                break
            hit_length = length
            if full_groups and len(self.attention_groups) == 2:
                # The other kind can only shorten the hit of full attention, which stays a hit.
                break
        for group in full_groups:
            for group_id in group.group_ids:
                hit_table = tables[group_id]
                assert hit_table is not None
                del hit_table[hit_length // group.spec.block_size :]
        self.num_uncached_common_prefix_tokens = longest - hit_length
        return tuple(table or [] for table in tables), hit_length

    def _find_in_group(
        self,
        group: SpecGroup,
        block_hashes: list[BlockHash],
        length: int,
        max_length: int,
        drop_eagle_block: bool,
    ) -> tuple[list[KVCacheBlock], ...]:
        hashes: BlockHashList = block_hashes
        block_size = group.spec.block_size
        if block_size != self.hash_block_size:
            hashes = BlockHashListWithBlockSize(block_hashes, self.hash_block_size, block_size)
        if drop_eagle_block:
            length = min(length + block_size, max_length)
        return group.manager_cls.find_longest_cache_hit(
            block_hashes=hashes,
            max_length=length,
            kv_cache_group_ids=group.group_ids,
            block_pool=self.block_pool,
            kv_cache_spec=group.spec,
            drop_eagle_block=drop_eagle_block,
            alignment_tokens=self.scheduler_block_size,
        )


def _validate_retention_interval(
    retention_interval: int | None, scheduler_block_size: int, kv_cache_config: KVCacheConfig
) -> None:
    if retention_interval is None:
        return
    if not any(
        isinstance(group.kv_cache_spec, SlidingWindowSpec | MambaSpec)
        for group in kv_cache_config.kv_cache_groups
    ):
        raise UserError(
            f"retention_interval={retention_interval}: the model has no sliding-window or Mamba "
            "KV cache group, so it has no effect; leave it unset."
        )
    if retention_interval < 0 or retention_interval % scheduler_block_size != 0:
        raise UserError(
            f"retention_interval={retention_interval}: must be non-negative and a multiple of "
            f"scheduler_block_size ({scheduler_block_size})."
        )


_MANAGERS: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    RSWASpec: RSWAManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    CrossAttentionSpec: CrossAttentionManager,
    MambaSpec: MambaManager,
}


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec, max_num_batched_tokens: int, max_model_len: int, **kwargs: Any
) -> SingleTypeKVCacheManager:
    """The manager of a group; `kwargs` go to its constructor. ValueError for an unknown spec."""
    for base in type(kv_cache_spec).__mro__:
        if base in _MANAGERS:
            manager_class = _MANAGERS[base]
            break
    else:
        raise ValueError(f"No manager for KV cache spec {type(kv_cache_spec).__name__}.")
    if isinstance(kv_cache_spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        kwargs["max_admission_blocks_per_request"] = kv_cache_spec.max_admission_blocks_per_request(
            max_num_batched_tokens=max_num_batched_tokens, max_model_len=max_model_len
        )
    return manager_class(kv_cache_spec, **kwargs)


def get_kv_cache_coordinator(
    kv_cache_config: KVCacheConfig, *, enable_caching: bool, **settings: Any
) -> KVCacheCoordinator:
    """The coordinator that fits the number of groups and whether prefixes are cached.

    All arguments go to its constructor, see `KVCacheCoordinator`.
    """
    if not enable_caching:
        return KVCacheCoordinatorNoPrefixCache(kv_cache_config=kv_cache_config, **settings)
    one_group = len(kv_cache_config.kv_cache_groups) == 1
    coordinator = UnitaryKVCacheCoordinator if one_group else HybridKVCacheCoordinator
    return coordinator(kv_cache_config, enable_caching=True, **settings)
