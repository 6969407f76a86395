# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/single_type_kv_cache_manager.py @ v0.25.0
"""Blocks of the requests in one KV cache group, after the rules of its kind of attention."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllmx.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    cdiv,
)
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.core.block_hash import BlockHashList
    from vllmx.core.block_pool import BlockPool
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.request import Request


class SingleTypeKVCacheManager(ABC):
    """Block tables of one group. Entry i of a table holds tokens [i, i + 1) * block_size.

    `max_admission_blocks_per_request` is the most blocks a request can hold where blocks are
    freed on the way, None where they are not. `scheduler_block_size` is the step of prefix hits,
    a multiple of every group's block size.
    """

    counts_encoder_tokens = False
    """Whether the table is of an encoder's positions instead of the request's tokens."""

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        scheduler_block_size: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        assert dcp_world_size == pcp_world_size == 1, "context parallelism is not supported"
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.scheduler_block_size = scheduler_block_size
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.dcp_world_size = dcp_world_size
        self.pcp_world_size = pcp_world_size
        self._max_admission_blocks_per_request = max_admission_blocks_per_request
        self._null_block = block_pool.null_block
        self.req_to_blocks: defaultdict[str, list[KVCacheBlock]] = defaultdict(list)
        # How many of a request's first blocks have been through cache_blocks.
        self.num_cached_block: dict[str, int] = {}
        # Whether hits drop the last block, set by the coordinator.
        self.use_eagle = False
        # Attention blocks to clear before use; recorded only where old states may be in them.
        self.records_new_blocks = isinstance(kv_cache_spec, FullAttentionSpec)
        self.new_block_ids: list[int] = []

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that the request takes to have `num_tokens` slots.

        Hit blocks nobody holds are in the free queue and so count too. `num_tokens_main_model`
        leaves out the lookahead tokens of a drafter. `apply_admission_cap` asks for the most held
        at once instead of what this step needs.
        """
        num_required = cdiv(num_tokens, self.block_size)
        if apply_admission_cap and self._max_admission_blocks_per_request is not None:
            num_required = min(num_required, self._max_admission_blocks_per_request)
        num_held = len(self.req_to_blocks.get(request_id, ()))
        if request_id in self.num_cached_block:
            # It runs, so it has no new hits. It may hold more than required: slots of drafted
            # tokens that were rejected.
            assert len(new_computed_blocks) == 0
            return max(num_required - num_held, 0)
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        num_computed = len(new_computed_blocks) + num_held
        num_new = max(num_required - max(num_skipped, num_computed), 0)
        kept = new_computed_blocks[max(0, num_skipped - num_held) :]
        return num_new + self._get_num_evictable_blocks(kept)

    @classmethod
    def _get_num_evictable_blocks(cls, blocks: Sequence[KVCacheBlock]) -> int:
        return sum(block.ref_cnt == 0 and not block.is_null for block in blocks)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Start the table of a request with its prefix hits, holding those it still needs."""
        table = self.req_to_blocks[request_id]
        assert not table
        num_computed = num_local_computed_tokens + num_external_computed_tokens
        num_skipped = self.get_num_skipped_tokens(num_computed) // self.block_size
        if num_skipped > 0:
            table.extend([self._null_block] * num_skipped)
            new_computed_blocks = new_computed_blocks[num_skipped:]
        if self.enable_caching:
            self.block_pool.touch(new_computed_blocks)
        else:
            assert not new_computed_blocks, "prefix hits while prefix caching is off"
        table.extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(table)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Take blocks for tokens whose entries come from outside the pool.

        Runs after every group holds its hits, which taking blocks could evict otherwise.
        """
        num_computed = num_local_computed_tokens + num_external_computed_tokens
        num_kept = num_computed - max(self.get_num_skipped_tokens(num_computed), 0)
        if min(num_kept, num_external_computed_tokens) <= 0:
            return
        table = self.req_to_blocks[request_id]
        self._extend(table, cdiv(num_computed, self.block_size) - len(table))

    def _extend(self, table: list[KVCacheBlock], num_blocks: int) -> list[KVCacheBlock]:
        new_blocks = self.block_pool.get_new_blocks(num_blocks)
        table.extend(new_blocks)
        if self.records_new_blocks:
            self.new_block_ids.extend(block.block_id for block in new_blocks)
        return new_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the request's table to `num_tokens` slots; returns the blocks taken."""
        table = self.req_to_blocks[request_id]
        num_new = cdiv(num_tokens, self.block_size) - len(table)
        return self._extend(table, num_new) if num_new > 0 else []

    def take_new_block_ids(self) -> list[int]:
        """Blocks taken since the last call that must be cleared before use."""
        ids, self.new_block_ids = self.new_block_ids, []
        return ids

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Let the full blocks among the first `num_tokens` tokens be found by other requests.

        `retention_interval` thins out what windowed and recurrent groups keep: None keeps all a
        hit may need, n what a hit at a multiple of n needs, 0 what a repeat of the prompt needs.
        """
        request_id = request.request_id
        num_cached = self.num_cached_block.get(request_id, 0)
        num_full = num_tokens // self.block_size
        if num_cached >= num_full:
            return
        block_mask = self.reachable_block_mask(
            num_cached,
            num_full,
            self.scheduler_block_size,
            self.kv_cache_spec,
            self.use_eagle,
            retention_interval,
            request.num_prompt_tokens,
        )
        self.block_pool.cache_full_blocks(
            request,
            self.req_to_blocks[request_id],
            num_cached,
            num_full,
            self.block_size,
            self.kv_cache_group_id,
            block_mask,
        )
        self.num_cached_block[request_id] = num_full

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> list[bool] | None:
        """Which of blocks [start, end) a hit can ever use; None is all."""
        return None

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; its blocks, first to last, still count as held by it."""
        self.num_cached_block.pop(request_id, None)
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Forget the request and give its blocks back, so that its tail is evicted first."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    @abstractmethod
    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """First blocks of the request that all requests with blocks share."""

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """The longest cached prefix of at most `max_length` tokens, a list of blocks a group.

        It is common to all of `kv_cache_group_ids` and a multiple of `alignment_tokens` long.
        Blocks that the next token does not attend to are the null block. `drop_eagle_block`
        leaves out the last block, which the drafter must compute to have its hidden states.
        """

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give back the blocks that no later token attends to; null blocks take their place."""
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.block_size
        if num_skipped > 0:
            self._remove_blocks(request_id, 0, num_skipped)

    def _remove_blocks(self, request_id: str, first: int, end: int) -> None:
        """Give back blocks [first, end) of the table, null blocks taking their place."""
        table = self.req_to_blocks[request_id]
        freed = []
        # From the end, so that what an earlier call has removed is reached last and stops it.
        for i in range(min(end, len(table)) - 1, first - 1, -1):
            if table[i] is self._null_block:
                break
            freed.append(table[i])
            table[i] = self._null_block
        if freed:
            self.block_pool.free_blocks(freed)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens at the start that the next token and all after it do not attend to."""
        return 0

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """Longest length up to which a step neither takes nor gives back a block.

        Holds right after blocks were removed for `num_computed_tokens` and taken for the step.
        """
        return len(self.req_to_blocks[request_id]) * self.block_size

    def new_step_starts(self) -> None:  # noqa: B027
        """Called before each step."""


class FullAttentionManager(SingleTypeKVCacheManager):
    """Keeps every block until the request ends."""

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Walks from the first block until one is not cached."""
        hits: list[list[KVCacheBlock]] = []
        block_size = kv_cache_spec.block_size
        for block_hash in itertools.islice(block_hashes, max_length // block_size):
            cached = block_pool.get_cached_block(block_hash, kv_cache_group_ids)
            if cached is None:
                break
            hits.append(cached)
        if drop_eagle_block and hits:
            hits.pop()
        while len(hits) * block_size % alignment_tokens != 0:
            hits.pop()
        return tuple([hit[i] for hit in hits] for i in range(len(kv_cache_group_ids)))

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """First blocks of the request that all requests with blocks share."""
        num_requests = len(self.req_to_blocks)
        num_common = 0
        for block in self.req_to_blocks[running_request_id]:
            if block.ref_cnt != num_requests:
                break
            num_common += 1
        return num_common


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Keeps the blocks that the window of the next token touches."""

    def __init__(self, kv_cache_spec: SlidingWindowSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.sliding_window = kv_cache_spec.sliding_window

    @classmethod
    def _contiguous_blocks_for_hit(cls, window_size: int, block_size: int, use_eagle: bool) -> int:
        """Cached blocks in a row that make a hit; with eagle one more, to be dropped."""
        return cdiv(window_size - 1, block_size) + use_eagle

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Walks from the last block until a run of cached ones covers the window.

        A shorter run is a hit too if it begins with the first block.
        """
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        block_size = kv_cache_spec.block_size
        needed = cls._contiguous_blocks_for_hit(
            kv_cache_spec.sliding_window, block_size, drop_eagle_block
        )
        num_blocks = max_length // block_size
        tables = tuple([block_pool.null_block] * num_blocks for _ in kv_cache_group_ids)
        length = run = 0
        for i in range(num_blocks - 1, -1, -1):
            cached = block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
            if cached is None:
                run = 0
                continue
            if run == 0:
                # The run must end where hits may end, once the eagle block is dropped.
                end = i if drop_eagle_block else i + 1
                if end * block_size % alignment_tokens != 0:
                    continue
            for table, block in zip(tables, cached, strict=True):
                table[i] = block
            run += 1
            if run >= needed:
                length = i + run
                break
        else:
            length = cls._align(run, block_size, alignment_tokens)
        if drop_eagle_block and length:
            length = cls._align(length - 1, block_size, alignment_tokens)
        for table in tables:
            del table[length:]
        return tables

    @staticmethod
    def _align(num_blocks: int, block_size: int, alignment_tokens: int) -> int:
        """`num_blocks`, less those beyond a multiple of `alignment_tokens`."""
        while num_blocks * block_size % alignment_tokens != 0:
            num_blocks -= 1
        return num_blocks

    @classmethod
    def reachable_block_mask(
        cls,
        start_block: int,
        end_block: int,
        alignment_tokens: int | None,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        retention_interval: int | None = None,
        num_prompt_tokens: int | None = None,
    ) -> list[bool] | None:
        """Marks the window before each place where a hit may end."""
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        if alignment_tokens is None:
            return None
        block_size = kv_cache_spec.block_size
        assert alignment_tokens % block_size == 0
        needed = cls._contiguous_blocks_for_hit(kv_cache_spec.sliding_window, block_size, use_eagle)
        # With eagle the run goes one block past the place, to be dropped.
        shift = int(use_eagle)
        mask = [False] * (end_block - start_block)
        if retention_interval != 0:
            segment = alignment_tokens if retention_interval is None else retention_interval
            per_segment = segment // block_size
            if needed >= per_segment:
                return None
            for i in range(max(start_block, shift), end_block):
                mask[i - start_block] = (i - shift) % per_segment >= per_segment - needed
        if retention_interval is not None and num_prompt_tokens is not None:
            # A repeat of the prompt computes its last token, so it hits the last place before.
            last_hit = (num_prompt_tokens - 1) // alignment_tokens * alignment_tokens
            end = last_hit // block_size + shift
            for i in range(max(start_block, end - needed), min(end_block, end)):
                mask[i - start_block] = True
        return mask

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens before the window of token `num_computed_tokens`."""
        return max(0, num_computed_tokens - self.sliding_window + 1)

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """Also ends where the window leaves a block."""
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        leaves_block = (num_skipped + 1) * self.block_size + self.sliding_window - 1
        return min(super().unchanged_until(request_id, num_computed_tokens), leaves_block)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: the first blocks may be null, which all requests share without sharing content."""
        return 0


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Keeps the blocks of the chunk that the next token is in."""

    def __init__(self, kv_cache_spec: ChunkedLocalAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size
        # A hit may end where a chunk begins, and there alone can what is before be left out.
        if self.enable_caching and self.attention_chunk_size % self.block_size != 0:
            raise UserError(
                f"cache.block_size={self.block_size} does not divide the model's attention chunk "
                f"of {self.attention_chunk_size} tokens: choose one that does, or set "
                "cache.enable_prefix_caching=false."
            )

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Earlier chunks count as hit, then walks the chunk until a block is not cached."""
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        assert not drop_eagle_block, "chunked local attention has no support for eagle"
        block_size = kv_cache_spec.block_size
        assert block_size == alignment_tokens, (
            "chunked local attention needs one block size for all groups"
        )
        chunk_size = kv_cache_spec.attention_chunk_size
        first = max_length // chunk_size * chunk_size // block_size
        tables = tuple([block_pool.null_block] * first for _ in kv_cache_group_ids)
        for i in range(first, max_length // block_size):
            cached = block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
            if cached is None:
                break
            for table, block in zip(tables, cached, strict=True):
                table.append(block)
        return tables

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Tokens of the chunks before that of token `num_computed_tokens`."""
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """Also ends with the chunk."""
        chunk_end = self.get_num_skipped_tokens(num_computed_tokens) + self.attention_chunk_size
        return min(super().unchanged_until(request_id, num_computed_tokens), chunk_end)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: the first blocks may be null, which all requests share without sharing content."""
        return 0
