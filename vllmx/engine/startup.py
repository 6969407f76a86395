# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core.py, vllm/config/scheduler.py @ v0.25.0
"""What the engine core settles once, before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmx.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
)
from vllmx.engine.executor import Executor, resolve_obj_by_qualname
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import SchedulerConfig, VllmConfig
    from vllmx.core.interface import SchedulerInterface


def resolve_scheduler_limits(vllm_config: VllmConfig) -> None:
    """Fill in the limits of a step that depend on max_model_len; UserError if they conflict."""
    _adapt_to_encoders(vllm_config)
    config = vllm_config.scheduler_config
    max_model_len = vllm_config.model_config.max_model_len
    assert max_model_len is not None, "resolve_model has to run before the engine is built"
    if config.max_num_batched_tokens is None:
        at_least = (
            DEFAULT_MAX_NUM_BATCHED_TOKENS if config.enable_chunked_prefill else max_model_len
        )
        config.max_num_batched_tokens = max(at_least, config.max_num_seqs)
    if config.max_num_batched_tokens < config.max_num_seqs:
        raise UserError(
            f"scheduler.max_num_batched_tokens={config.max_num_batched_tokens} is less than "
            f"scheduler.max_num_seqs={config.max_num_seqs}: each running request needs a token of "
            "the step. Raise the first or lower the second."
        )
    if not config.enable_chunked_prefill and config.max_num_batched_tokens < max_model_len:
        raise UserError(
            f"scheduler.max_num_batched_tokens={config.max_num_batched_tokens} is less than "
            f"model.max_model_len={max_model_len} and scheduler.enable_chunked_prefill=false: a "
            "longer prompt could never run. Raise the first, lower the second, or chunk prompts."
        )
    if config.max_long_partial_prefills > config.max_num_partial_prefills:
        raise UserError(
            f"scheduler.max_long_partial_prefills={config.max_long_partial_prefills} is more than "
            f"scheduler.max_num_partial_prefills={config.max_num_partial_prefills}."
        )
    if config.max_num_partial_prefills > 1:
        if not config.enable_chunked_prefill:
            raise UserError(
                "scheduler.max_num_partial_prefills>1 needs scheduler.enable_chunked_prefill=true."
            )
        if config.long_prefill_token_threshold == 0:
            config.long_prefill_token_threshold = int(max_model_len * 0.04)
        if config.long_prefill_token_threshold > max_model_len:
            raise UserError(
                "scheduler.long_prefill_token_threshold="
                f"{config.long_prefill_token_threshold} is more than model.max_model_len="
                f"{max_model_len}."
            )


def _adapt_to_encoders(vllm_config: VllmConfig) -> None:
    """Switch off what a decoder that attends to an encoder can't do; UserError if there is no
    encoder whose outputs could be moved."""
    model_config = vllm_config.model_config
    if model_config.is_encoder_decoder:
        vllm_config.scheduler_config.adapt_to_encoder_decoder()
        vllm_config.cache_config.enable_prefix_caching = False
    if vllm_config.ec_transfer_config is not None and not model_config.mm_max_toks_per_item:
        raise UserError(
            "ec_transfer: the model takes text alone, so there are no encoder outputs to move; "
            "leave ec_transfer_config unset."
        )


def get_scheduler_cls(config: SchedulerConfig) -> type[SchedulerInterface]:
    """The class named by scheduler_cls, else the one that async_scheduling asks for."""
    if config.scheduler_cls is not None:
        if isinstance(config.scheduler_cls, str):
            return resolve_obj_by_qualname(config.scheduler_cls, "scheduler.scheduler_cls")
        return config.scheduler_cls
    if config.async_scheduling:
        from vllmx.core.async_scheduler import AsyncScheduler

        return AsyncScheduler
    from vllmx.core.scheduler import Scheduler

    return Scheduler


def initialize_kv_caches(vllm_config: VllmConfig, executor: Executor) -> KVCacheConfig:
    """Size the KV cache, have the workers allocate it, and note its size in cache_config.

    max_model_len is lowered to what the cache holds unless the user has set it; then a cache that
    is too small is a UserError.
    """
    specs = executor.get_kv_cache_specs()
    has_cache = any(specs)
    available_memory = executor.determine_available_memory() if has_cache else [0] * len(specs)
    configs = get_kv_cache_configs(vllm_config, specs, available_memory)
    kv_cache_config = generate_scheduler_kv_cache_config(configs)
    cache_config = vllm_config.cache_config
    cache_config.num_gpu_blocks = kv_cache_config.num_blocks  # type: ignore[assignment]
    groups = kv_cache_config.kv_cache_groups
    if groups:
        cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)
        num_tokens, max_concurrency = get_kv_cache_capacity(vllm_config, kv_cache_config)
        cache_config.kv_cache_size_tokens = num_tokens  # type: ignore[assignment]
        cache_config.kv_cache_max_concurrency = max_concurrency  # type: ignore[assignment]
    executor.initialize_from_config(configs)
    return kv_cache_config
