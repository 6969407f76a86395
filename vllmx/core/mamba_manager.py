# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/single_type_kv_cache_manager.py @ v0.25.0
"""Blocks that hold recurrent states instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllmx.core.kv_cache_interface import KVCacheSpec, MambaSpec, cdiv
from vllmx.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

if TYPE_CHECKING:
    from vllmx.core.block_hash import BlockHashList, BlockHashWithGroupId
    from vllmx.core.block_pool import BlockPool
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.request import Request


class MambaManager(SingleTypeKVCacheManager):
    """Keeps the last recurrent state, in as many blocks as the cache mode asks for.

    Mode "align" puts null blocks where no state is kept: a request has one block with its running
    state and `num_speculative_blocks` after it, which move along the table as it grows.
    """

    def __init__(self, kv_cache_spec: MambaSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.mamba_cache_mode = kv_cache_spec.mamba_cache_mode
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        self.cached_blocks_this_step: set[BlockHashWithGroupId] = set()
        # Mode "align": where the state before the last one is, and who has taken blocks.
        self.last_state_block_idx: dict[str, int] = {}
        self._allocated_block_reqs: set[str] = set()

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
        """The last cached state is all that is needed; null blocks stand before it."""
        assert isinstance(kv_cache_spec, MambaSpec)
        block_size = kv_cache_spec.block_size
        for i in range(max_length // block_size - 1, -1, -1):
            if (i + 1) * block_size % alignment_tokens != 0:
                continue
            cached = block_pool.get_cached_block(block_hashes[i], kv_cache_group_ids)
            if cached is not None:
                return tuple([block_pool.null_block] * i + [block] for block in cached)
        return tuple([] for _ in kv_cache_group_ids)

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
        """Marks the state at each place where a hit may end. Drafters have no states."""
        if retention_interval is None or alignment_tokens is None:
            return None
        block_size = kv_cache_spec.block_size
        per_segment = retention_interval // block_size
        if retention_interval > 0 and per_segment <= 1:
            return None
        last_hit_block = -1
        if num_prompt_tokens is not None:
            last_hit = (num_prompt_tokens - 1) // alignment_tokens * alignment_tokens
            last_hit_block = last_hit // block_size - 1
        return [
            i == last_hit_block or (per_segment > 1 and (i + 1) % per_segment == 0)
            for i in range(start_block, end_block)
        ]

    def remove_skipped_blocks(
        self,
        request_id: str,
        total_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Give back the states before the last one that is certain.

        The last `num_speculative_blocks` tokens may be rejected still, so they do not count.
        """
        num_certain = max(0, total_computed_tokens - self.num_speculative_blocks)
        super().remove_skipped_blocks(request_id, num_certain, num_prompt_tokens)
        if self.mamba_cache_mode != "align":
            return
        # The state of the last step is being copied into this step's block, the one before that
        # is done with. Null blocks around it hide it from the walk above.
        idx = self.last_state_block_idx.get(request_id)
        if idx is not None and idx < cdiv(num_certain, self.block_size) - 1:
            table = self.req_to_blocks[request_id]
            if table[idx] is not self._null_block:
                self.block_pool.free_blocks([table[idx]])
                table[idx] = self._null_block

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: a state is not read by several requests at once."""
        return 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that the request takes; more than there are if it must wait a step.

        It must when the state it hit is only being computed in this step.
        """
        if (
            len(new_computed_blocks) > 0
            and new_computed_blocks[-1].block_hash in self.cached_blocks_this_step
        ):
            return self.block_pool.num_gpu_blocks + 1
        if self.mamba_cache_mode != "align":
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens + self.block_size * self.num_speculative_blocks,
                new_computed_blocks,
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap=apply_admission_cap,
            )
        num_required = self._num_aligned_blocks(num_tokens_main_model)
        num_held = len(new_computed_blocks) + len(self.req_to_blocks.get(request_id, ()))
        num_new = max(num_required - num_held, 0)
        if num_new > 0:
            # Later steps move the speculative blocks along, so they take one for the state only.
            started = request_id in self._allocated_block_reqs
            num_new = 1 if started else 1 + self.num_speculative_blocks
        return num_new + self._get_num_evictable_blocks(new_computed_blocks)

    def _num_aligned_blocks(self, num_tokens: int) -> int:
        """Length of a table in mode "align". Lookahead tokens have no state, so they don't count;
        drafted tokens do, although some may be rejected."""
        return cdiv(num_tokens, self.block_size) + self.num_speculative_blocks

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Extend the request's table; returns what was added, null and moved blocks included."""
        if self.mamba_cache_mode != "align":
            num_tokens += self.block_size * self.num_speculative_blocks
            return super().allocate_new_blocks(request_id, num_tokens, num_tokens_main_model)
        table = self.req_to_blocks[request_id]
        num_before = len(table)
        num_required = self._num_aligned_blocks(num_tokens_main_model)
        if num_required <= num_before:
            return []
        started = request_id in self._allocated_block_reqs
        if started:
            self.last_state_block_idx[request_id] = num_before - 1 - self.num_speculative_blocks
        elif num_before > 0:
            # The last block is the state that was hit.
            self.last_state_block_idx[request_id] = num_before - 1
        state_idx = num_required - self.num_speculative_blocks - 1
        table.extend([self._null_block] * (state_idx - num_before))
        if started:
            first_speculative = num_before - self.num_speculative_blocks
            for i in range(first_speculative, min(num_before, state_idx)):
                table.append(table[i])
                table[i] = self._null_block
        num_new = num_required - len(table)
        assert num_new <= (1 if started else 1 + self.num_speculative_blocks)
        table.extend(self.block_pool.get_new_blocks(num_new))
        self._allocated_block_reqs.add(request_id)
        return table[num_before:]

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request; its blocks, first to last, still count as held by it."""
        self._allocated_block_reqs.discard(request_id)
        self.last_state_block_idx.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """All but the last computed token, whose state the next one continues."""
        return num_computed_tokens - 1

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """0: states move in steps of their own."""
        return 0

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Let full blocks be found, from the next step on."""
        request_id = request.request_id
        num_before = self.num_cached_block.get(request_id, 0)
        super().cache_blocks(request, num_tokens, retention_interval=retention_interval)
        num_after = self.num_cached_block.get(request_id, 0)
        for block in self.req_to_blocks[request_id][num_before:num_after]:
            if not block.is_null and block.block_hash is not None:
                self.cached_blocks_this_step.add(block.block_hash)

    def new_step_starts(self) -> None:
        """What the last step cached has been computed by now."""
        self.cached_blocks_this_step.clear()
