# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_utils.py @ v0.25.0
"""A block of the KV cache, and the queue of those that are free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllmx.core.block_hash import BlockHashWithGroupId


@dataclass(slots=True, eq=False, repr=False)
class KVCacheBlock:
    """What is known of one block; compared by identity."""

    block_id: int
    """Index into the pool."""
    ref_cnt: int = 0
    """Requests that hold the block."""
    _block_hash: BlockHashWithGroupId | None = None
    _block_hash_num_tokens: int | None = None
    prev_free_block: KVCacheBlock = None  # type: ignore[assignment]
    """Neighbour in the free queue, written by the queue alone; None outside it."""
    next_free_block: KVCacheBlock = None  # type: ignore[assignment]
    """Neighbour in the free queue, written by the queue alone; None outside it."""
    is_null: bool = False
    """The placeholder for tokens whose keys and values are not kept."""

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """Prefix-cache key of the content, if it can be looked up."""
        return self._block_hash

    @property
    def block_hash_num_tokens(self) -> int | None:
        """Length of the prefix that `block_hash` stands for."""
        return self._block_hash_num_tokens

    def set_block_hash(
        self, block_hash: BlockHashWithGroupId, num_tokens: int | None = None
    ) -> None:
        """Give the block its key; it must not have one."""
        assert self._block_hash is None and self._block_hash_num_tokens is None, (
            f"block {self.block_id} already has a hash"
        )
        self._block_hash = block_hash
        self._block_hash_num_tokens = num_tokens

    def reset_hash(self) -> None:
        """Forget the key, as the content is about to be overwritten."""
        self._block_hash = None
        self._block_hash_num_tokens = None

    def __repr__(self) -> str:
        # Neighbours by id: their own repr would walk the whole queue.
        before, after = self.prev_free_block, self.next_free_block
        return (
            f"KVCacheBlock(block_id={self.block_id}, ref_cnt={self.ref_cnt}, "
            f"_block_hash={self._block_hash!r}, "
            f"_block_hash_num_tokens={self._block_hash_num_tokens}, "
            f"prev_free_block={before and before.block_id}, "
            f"next_free_block={after and after.block_id})"
        )


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they are taken: a linked list through the blocks.

    Unlike a deque it removes a block from the middle in O(1), which a prefix hit on a free block
    needs. Two sentinels, never handed out, spare every operation the case of an end.
    """

    def __init__(self, blocks: list[KVCacheBlock]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = KVCacheBlock(block_id=-1)
        self.fake_free_list_tail = KVCacheBlock(block_id=-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take the first block; ValueError if there is none."""
        if self.num_free_blocks == 0:
            raise ValueError("No free blocks available")
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take the first `n` blocks, which must be there."""
        if n == 0:
            return []
        assert self.num_free_blocks >= n, f"{n} blocks asked of {self.num_free_blocks}"
        taken = []
        block = self.fake_free_list_head.next_free_block
        for _ in range(n):
            following = block.next_free_block
            block.prev_free_block = block.next_free_block = None  # type: ignore[assignment]
            taken.append(block)
            block = following
        self.fake_free_list_head.next_free_block = block
        block.prev_free_block = self.fake_free_list_head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take `block` from wherever it stands; RuntimeError if it is not in the queue."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise RuntimeError(f"remove() called on an invalid block: {block}")
        before.next_free_block = after
        after.prev_free_block = before
        block.prev_free_block = block.next_free_block = None  # type: ignore[assignment]
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put `block` last."""
        self._insert_after(self.fake_free_list_tail.prev_free_block, [block])

    def append_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put `blocks` last, in their order."""
        if blocks:
            self._insert_after(self.fake_free_list_tail.prev_free_block, blocks)

    def prepend_n(self, blocks: list[KVCacheBlock]) -> None:
        """Put `blocks` first, in their order."""
        if blocks:
            self._insert_after(self.fake_free_list_head, blocks)

    def _insert_after(self, before: KVCacheBlock, blocks: list[KVCacheBlock]) -> None:
        assert before is not None and before.next_free_block is not None
        after = before.next_free_block
        for block in blocks:
            before.next_free_block = block
            block.prev_free_block = before
            before = block
        before.next_free_block = after
        after.prev_free_block = before
        self.num_free_blocks += len(blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All free blocks, first to last; for tests."""
        blocks = []
        block = self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            blocks.append(block)
            block = block.next_free_block
        return blocks
