# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""Pieces of prompts that end where a recurrent state is kept (`cache.mamba_cache_mode=align`).

A recurrent layer has one state, after the last token; a prefix can be hit only where a step ended
and left its state behind. So the steps of a prompt end at block ends, the last one of them as late
as possible.

What a model must bring: a `MambaSpec` with mode "align" and the block size of its attention
layers, padded to their page; and a runner that, where the running state of a request moves to
another block of its table (from the block of its last computed token to that of the last token of
the step), copies the state there before the step computes on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmx.core.kv_cache_interface import KVCacheConfig, MambaSpec
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import CacheConfig, SchedulerConfig
    from vllmx.core.kv_cache_manager import KVCacheManager
    from vllmx.core.schedule_step import CachedPrefix
    from vllmx.request import Request


class MambaAlignScheduling:
    """Mixed into the scheduler, which asks only if `need_mamba_block_aligned_split`."""

    cache_config: CacheConfig
    kv_cache_manager: KVCacheManager
    use_eagle: bool

    def _align_admission(self, request: Request, num_new_tokens: int, prefix: CachedPrefix) -> int:
        """Tokens of a waiting request with `prefix`, of at most `num_new_tokens`; 0: wait."""
        if prefix.load_async:
            return num_new_tokens  # nothing is computed yet
        num_common = 0
        if request.num_computed_tokens == 0 and not request.skip_reading_prefix_cache:
            coordinator = self.kv_cache_manager.coordinator
            num_common = getattr(coordinator, "num_uncached_common_prefix_tokens", 0)
        return self._mamba_block_aligned_split(
            request, num_new_tokens, prefix.num_local_tokens, prefix.num_external_tokens, num_common
        )

    def _mamba_block_aligned_split(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        num_uncached_common_prefix_tokens: int = 0,
    ) -> int:
        """At most `num_new_tokens`, so that a prompt's step ends at a block's end; 0: wait.

        The tail of a prompt that fills no block goes in one piece. A prefix that other groups
        have cached and this one has not (`num_uncached_common_prefix_tokens`) gets a step of its
        own, as it will be asked for again.
        """
        num_computed = (
            request.num_computed_tokens
            + num_new_local_computed_tokens
            + num_external_computed_tokens
        )
        if num_computed >= max(request.num_prompt_tokens, request.num_tokens - 1):
            return num_new_tokens  # it decodes
        block_size = self.cache_config.block_size
        assert block_size is not None
        last_state = request.num_tokens // block_size * block_size
        if self.use_eagle:
            # Attention drops the last block of a hit, so the state before it is the useful one.
            last_state = max(last_state - block_size, 0)
        end = num_computed + num_new_tokens
        if end < last_state:
            num_new_tokens = num_new_tokens // block_size * block_size
        elif num_computed < last_state < end:
            num_new_tokens = last_state - num_computed
        common = num_uncached_common_prefix_tokens
        if block_size <= common < num_new_tokens:
            num_new_tokens = common // block_size * block_size
        return num_new_tokens


def check_mamba_align(
    kv_cache_config: KVCacheConfig,
    cache_config: CacheConfig,
    scheduler_config: SchedulerConfig,
    scheduler_block_size: int,
) -> None:
    """Raise UserError for groups and limits with which a prompt could not be cut at block ends."""
    block_size = cache_config.block_size
    assert block_size is not None
    where = "cache.mamba_cache_mode=align"
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if not isinstance(spec, MambaSpec):
            continue
        if spec.mamba_cache_mode != "align":
            raise UserError(
                f"{where}: layer {group.layer_names[0]} keeps its states in mode "
                f"{spec.mamba_cache_mode}; the model has no support for align."
            )
        if not spec.block_size == block_size == scheduler_block_size:
            raise UserError(
                f"{where}: layer {group.layer_names[0]} keeps a state every {spec.block_size} "
                f"tokens, and hits end every {scheduler_block_size}; set cache.block_size "
                f"({block_size}) so that a page of attention holds a state."
            )
    budget = scheduler_config.max_num_batched_tokens
    threshold = scheduler_config.long_prefill_token_threshold
    if budget is not None and budget < block_size:
        raise UserError(
            f"{where}: scheduler.max_num_batched_tokens={budget} must be at least "
            f"cache.block_size={block_size}, as a step must reach the end of a block."
        )
    if 0 < threshold < block_size:
        raise UserError(
            f"{where}: scheduler.long_prefill_token_threshold={threshold} must be at least "
            f"cache.block_size={block_size}, as a step must reach the end of a block."
        )
