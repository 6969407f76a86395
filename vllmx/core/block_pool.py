# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/block_pool.py @ v0.25.0
"""The pool of KV blocks: which are free, which hold a prefix that can be found again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.core.block_hash import (
    BlockHash,
    BlockHashList,
    BlockHashListWithBlockSize,
    BlockHashWithGroupId,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)
from vllmx.core.kv_cache_block import FreeKVCacheBlockQueue, KVCacheBlock
from vllmx.core.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)

if TYPE_CHECKING:
    from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllmx.request import Request

logger = logging.getLogger(__name__)


class BlockHashToBlockMap:
    """The prefix cache: from key to block.

    Several blocks may have one key, since a block that turns out to equal a cached one stays
    where it is (block tables only grow). A dict of them is made only then, to spare the garbage
    collector one for each key.
    """

    def __init__(self) -> None:
        self._cache: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """A block with this key, the one that has had it longest."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def contain(self, key: BlockHashWithGroupId, block_id: int) -> bool:
        """Whether block `block_id` is found by `key`."""
        found = self._cache.get(key)
        if found is None:
            return False
        if isinstance(found, dict):
            return block_id in found
        return found.block_id == block_id

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> None:
        """Make `block` one of those found by `key`."""
        found = self._cache.get(key)
        if found is None:
            self._cache[key] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cache[key] = {found.block_id: found, block.block_id: block}

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Stop finding block `block_id` by `key`; None if it was not."""
        found = self._cache.get(key)
        if isinstance(found, dict):
            block = found.pop(block_id, None)
            if not found:
                del self._cache[key]
            return block
        if found is None or found.block_id != block_id:
            return None
        del self._cache[key]
        return found

    def __len__(self) -> int:
        return len(self._cache)


class BlockPool:
    """All blocks, the queue of the free ones and the prefix cache.

    A block is free (in the queue, `ref_cnt` 0) or used. A free one may still be cached: it is
    found and used again until it reaches the head of the queue and is handed out. Block 0 is the
    null block, which stands for tokens that are not kept; its `ref_cnt` means nothing.

    `hash_block_size` is the distance in tokens between two of a request's block hashes.
    """

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
    ) -> None:
        assert isinstance(num_gpu_blocks, int) and num_gpu_blocks > 0
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(idx) for idx in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        # Keys of a block besides its `block_hash`: prefixes that end inside it.
        self.cached_block_hashes_by_block: dict[int, set[BlockHashWithGroupId]] = {}
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        # Blocks that are never handed out: the null block and those of reserve_blocks.
        self.num_reserved_blocks = 1
        self.enable_kv_cache_events = enable_kv_cache_events
        self.kv_event_queue: list[KVCacheEvent] = []
        self.metrics_collector = metrics_collector

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: list[int]
    ) -> list[KVCacheBlock] | None:
        """The cached block of each group, or None if any group has none."""
        found = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            found.append(block)
        return found

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Let `blocks[num_cached_blocks:num_full_blocks]` of `request` be found from now on.

        `block_mask` (one entry for each of those) leaves out blocks that no hit can use; null
        blocks are always left out.
        """
        if num_cached_blocks >= num_full_blocks:
            return
        assert block_mask is None or len(block_mask) == num_full_blocks - num_cached_blocks
        block_hashes = self._hashes_of_size(request, block_size)
        assert len(block_hashes) >= num_full_blocks
        stored = []
        for i in range(num_cached_blocks, num_full_blocks):
            block = blocks[i]
            if block.is_null or (block_mask is not None and not block_mask[i - num_cached_blocks]):
                continue
            num_tokens = (i + 1) * block_size
            key = make_block_hash_with_group_id(block_hashes[i], kv_cache_group_id)
            if block.block_hash is not None:
                # Only a block known by a prefix that ends inside it may have a key before it is
                # full. From here on it is known by the longer prefix alone.
                assert block.block_hash_num_tokens is not None
                assert block.block_hash_num_tokens < num_tokens
                self._emit_block_removed_events(self._remove_cached_block_hashes(block))
            self._insert_block_hash(key, block, num_tokens)
            stored.append(i)
        if self.enable_kv_cache_events:
            parent = block_hashes[num_cached_blocks - 1] if num_cached_blocks else None
            spans = [(i * block_size, (i + 1) * block_size) for i in stored]
            self._emit_block_stored_event(
                request,
                [block_hashes[i] for i in stored],
                parent,
                (num_cached_blocks * block_size, num_full_blocks * block_size),
                block_size,
                _extra_keys_of_spans(request, spans),
                kv_cache_group_id,
            )

    def _hashes_of_size(self, request: Request, block_size: int) -> BlockHashList:
        if block_size == self.hash_block_size:
            return request.block_hashes
        return BlockHashListWithBlockSize(request.block_hashes, self.hash_block_size, block_size)

    def cache_partial_block(
        self,
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        block_size: int,
    ) -> BlockHashWithGroupId | None:
        """Let `block` be found by the prefix of `num_tokens` tokens, which ends inside it.

        `num_tokens` is a multiple of `hash_block_size` that the request has a hash for. Returns
        the key, or None for the null block.
        """
        if block.is_null:
            return None
        step = self.hash_block_size
        assert block_size > step and block_size % step == 0
        assert num_tokens % step == 0 and num_tokens % block_size != 0
        last = num_tokens // step - 1
        assert 0 <= last < len(request.block_hashes)
        block_hash = request.block_hashes[last]
        key = make_block_hash_with_group_id(block_hash, kv_cache_group_id)
        if block.block_hash == key or self.cached_block_hash_to_block.contain(key, block.block_id):
            return key
        known = block.block_hash_num_tokens
        if block.block_hash is not None and known is not None and known < num_tokens:
            self._emit_block_removed_events(self._remove_cached_block_hashes(block))
        self._insert_block_hash(key, block, num_tokens)
        if self.enable_kv_cache_events:
            span = (last * step, num_tokens)
            extra_keys, _ = generate_block_hash_extra_keys(request, *span, -1 if last else 0)
            parent = request.block_hashes[last - 1] if last else None
            self._emit_block_stored_event(
                request, [block_hash], parent, span, step, [extra_keys], kv_cache_group_id
            )
        return key

    def _emit_block_stored_event(
        self,
        request: Request,
        block_hashes: list[BlockHash],
        parent: BlockHash | None,
        span: tuple[int, int],
        block_size: int,
        extra_keys: list[tuple[Any, ...] | None],
        group_id: int,
    ) -> None:
        lora = request.lora_request
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(h) for h in block_hashes],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
                token_ids=request.all_token_ids[span[0] : span[1]],
                block_size=block_size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=extra_keys or None,
                group_idx=group_id,
            )
        )

    def _emit_block_removed_events(self, keys: list[BlockHashWithGroupId]) -> None:
        if not self.enable_kv_cache_events:
            return
        for key in keys:
            self.kv_event_queue.append(
                BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(get_block_hash(key))],
                    medium=MEDIUM_GPU,
                    group_idx=get_group_id(key),
                )
            )

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        """Stop finding `block` by any key; returns the keys that were in the cache."""
        if block.block_hash is None:
            # Further keys are only given to a block that has a first one.
            return []
        keys = [block.block_hash]
        keys.extend(self.cached_block_hashes_by_block.pop(block.block_id, ()))
        block.reset_hash()
        cache = self.cached_block_hash_to_block
        return [key for key in keys if cache.pop(key, block.block_id) is not None]

    def _insert_block_hash(
        self, key: BlockHashWithGroupId, block: KVCacheBlock, num_tokens: int
    ) -> None:
        if block.block_hash is None:
            block.set_block_hash(key, num_tokens=num_tokens)
        else:
            self.cached_block_hashes_by_block.setdefault(block.block_id, set()).add(key)
        self.cached_block_hash_to_block.insert(key, block)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take the blocks that were free longest, dropping what they cached.

        ValueError if fewer than `num_blocks` are free.
        """
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool")
        blocks = self.free_block_queue.popleft_n(num_blocks)
        collector = self.metrics_collector
        for block in blocks:
            assert block.ref_cnt == 0
            if self.enable_caching and (block.block_hash is not None or collector is not None):
                self._maybe_evict_cached_block(block)
            block.ref_cnt = 1
            if collector is not None:
                collector.on_block_allocated(block)
        return blocks

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks out of the pool for as long as it lives; ValueError if there are too few."""
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(f"Cannot reserve {num_blocks} free blocks of the pool")
        self.num_reserved_blocks += num_blocks
        return self.free_block_queue.popleft_n(num_blocks)

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop `block` from the prefix cache; False if it was not in it."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        evicted = self._remove_cached_block_hashes(block)
        self._emit_block_removed_events(evicted)
        return bool(evicted)

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take a reference to cached `blocks`, out of the free queue if they were in it."""
        collector = self.metrics_collector
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if collector is not None:
                collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Give a reference to each block back; the first given is the first to be evicted.

        Blocks that nobody holds any more go to the end of the queue, or to its front where they
        have no key and so can never be hit.
        """
        with_hash: list[KVCacheBlock] = []
        without_hash: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (without_hash if block.block_hash is None else with_hash).append(block)
        self.free_block_queue.prepend_n(without_hash)
        self.free_block_queue.append_n(with_hash)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Drop blocks from the prefix cache, whether free or used; used ones stay used."""
        for block_id in block_ids:
            assert block_id < self.num_gpu_blocks, (
                f"Invalid block_id {block_id} >= {self.num_gpu_blocks}"
            )
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache; does nothing and returns False while a block is in use."""
        num_used = self.num_gpu_blocks - self.num_reserved_blocks - self.get_num_free_blocks()
        if num_used != 0:
            logger.warning("Prefix cache not reset: %d blocks are still in use.", num_used)
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block.clear()
        for block in self.blocks:
            block.reset_hash()
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        logger.info("Prefix cache reset.")
        return True

    def get_num_free_blocks(self) -> int:
        """Blocks that can be handed out, cached ones included."""
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks in use, 0.0 to 1.0; reserved ones do not count."""
        total = self.num_gpu_blocks - self.num_reserved_blocks
        if total == 0:
            return 0.0
        return 1.0 - self.get_num_free_blocks() / total

    def take_events(self) -> list[KVCacheEvent]:
        """The events since the last call; none unless events are enabled."""
        if not self.enable_kv_cache_events:
            return []
        events, self.kv_event_queue = self.kv_event_queue, []
        return events


def _extra_keys_of_spans(
    request: Request, spans: list[tuple[int, int]]
) -> list[tuple[Any, ...] | None]:
    keys = []
    mm_idx = 0
    for start, end in spans:
        extra_keys, mm_idx = generate_block_hash_extra_keys(request, start, end, mm_idx)
        keys.append(extra_keys)
    return keys
