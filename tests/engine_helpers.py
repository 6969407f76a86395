# SPDX-License-Identifier: Apache-2.0
"""Engines without a model, for the tests of scheduler and engine core."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from vllmx.config import VllmConfig
from vllmx.core.async_scheduler import AsyncScheduler
from vllmx.core.block_hash import get_request_block_hasher, init_none_hash, sha256
from vllmx.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllmx.core.output import ModelRunnerOutput, SchedulerOutput
from vllmx.core.scheduler import Scheduler
from vllmx.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllmx.engine.core import EngineCore
from vllmx.engine.executor import UniProcExecutor
from vllmx.metrics.stats import SchedulerStats
from vllmx.request import Request, RequestStatus
from vllmx.sampling_params import SamplingParams
from vllmx.worker.null_runner import NullModelRunner, NullWorker

init_none_hash(sha256)


def make_config(
    *,
    block_size: int = 4,
    num_blocks: int = 64,
    max_model_len: int = 128,
    max_num_batched_tokens: int = 64,
    max_num_seqs: int = 8,
    caching: bool = True,
    **scheduler: Any,
) -> VllmConfig:
    """A config of the null worker; `scheduler` holds further fields of SchedulerConfig."""
    config = VllmConfig()
    config.model_config.max_model_len = max_model_len
    config.model_config.max_model_len_pinned = True
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks_override = num_blocks
    config.cache_config.enable_prefix_caching = caching
    for name, value in scheduler.items():
        assert hasattr(config.scheduler_config, name), name
        setattr(config.scheduler_config, name, value)
    config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    config.scheduler_config.max_num_seqs = max_num_seqs
    config.parallel_config.worker_cls = partial(NullWorker, check=True)
    return config


def full_spec(block_size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32")


def window_spec(block_size: int, window: int) -> SlidingWindowSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype="float32", sliding_window=window
    )


def make_scheduler(
    config: VllmConfig,
    specs: list[KVCacheSpec] | None = None,
    log_stats: bool = True,
    **settings: Any,
) -> Scheduler:
    """A scheduler with one KV group a spec, without the start-up checks of an engine; `settings`
    are further arguments of its constructor."""
    block_size = config.cache_config.block_size
    num_blocks = config.cache_config.num_gpu_blocks_override
    specs = specs or [full_spec(block_size)]
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    config.cache_config.num_gpu_blocks = num_blocks
    scheduler_cls = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    return scheduler_cls(
        config,
        KVCacheConfig(num_blocks, [], groups),
        None,
        block_size=math.lcm(*[spec.block_size for spec in specs]),
        hash_block_size=block_size,
        log_stats=log_stats,
        **settings,
    )


def make_request(
    request_id: str,
    prompt: int | list[int] = 8,
    max_tokens: int = 4,
    *,
    block_size: int = 4,
    priority: int = 0,
    arrival_time: float = 0.0,
    **params: Any,
) -> Request:
    """A request as the scheduler gets it; a number stands for a prompt of its own."""
    if isinstance(prompt, int):
        base = 1000 * (1 + sum(ord(c) * 7**i for i, c in enumerate(request_id)) % 9999)
        prompt = [base + i for i in range(prompt)]
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        None,
        arrival_time=arrival_time,
        priority=priority,
        block_hasher=get_request_block_hasher(block_size, sha256),
        hash_block_size=block_size,
    )


def make_engine_request(
    request_id: str, prompt: int | list[int] = 8, max_tokens: int = 4, **params: Any
) -> EngineCoreRequest:
    """A request as a front end sends it."""
    tokens = (
        prompt if isinstance(prompt, list) else make_request(request_id, prompt).prompt_token_ids
    )
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=tokens,
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, **params),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def run_model(scheduler_output: SchedulerOutput, tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    """The runner's answer that gives each scheduled request `tokens`, or [] where none is named."""
    req_ids = list(scheduler_output.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=req_ids,
        req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
        sampled_token_ids=[tokens.get(req_id, []) for req_id in req_ids],
    )


class Loop:
    """Scheduler and checked null runner, stepped by hand; collects what comes out.

    With async scheduling results are taken in one step late, as by a batch queue.
    """

    def __init__(self, config: VllmConfig, specs: list[KVCacheSpec] | None = None) -> None:
        self.scheduler = make_scheduler(config, specs)
        self.runner = NullModelRunner(config, check=True)
        self.runner.initialize_kv_cache(self.scheduler.kv_cache_config)
        self.depth = 2 if config.scheduler_config.async_scheduling else 1
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineCoreOutput] = {}
        self.first: dict[str, EngineCoreOutput] = {}
        self.stats: list[SchedulerStats] = []
        self.all_outputs: list[EngineCoreOutput] = []

    def add(self, request: Request) -> None:
        self.tokens[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(list(request_ids), RequestStatus.FINISHED_ABORTED)

    def step(self, between: Callable[[], None] = lambda: None) -> SchedulerOutput | None:
        """One step; `between` runs after the model and before the update."""
        scheduler_output = None
        if self.scheduler.has_requests():
            scheduler_output = self.scheduler.schedule()
            result = self.runner.execute_model(scheduler_output)
            if result is None:
                result = self.runner.sample_tokens(None)
            self.in_flight.append((scheduler_output, result))
            self.check_pool()
            if len(self.in_flight) < self.depth and self.scheduler.has_requests():
                between()
                return scheduler_output
        between()
        if self.in_flight:
            self._take_in(self.scheduler.update_from_output(*self.in_flight.popleft()))
            self.check_pool()
        return scheduler_output

    def _take_in(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        for client_outputs in outputs.values():
            if client_outputs.scheduler_stats is not None:
                self.stats.append(client_outputs.scheduler_stats)
            for output in client_outputs.outputs:
                assert output.request_id not in self.finished, "output after the last one"
                self.all_outputs.append(output)
                self.first.setdefault(output.request_id, output)
                self.tokens[output.request_id] += output.new_token_ids
                if output.finished:
                    self.finished[output.request_id] = output

    def run(self, max_steps: int = 3000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def check_pool(self) -> None:
        """Every block is either free or in the table of a living request, and counted right."""
        manager = self.scheduler.kv_cache_manager
        references: dict[int, int] = {}
        for single in manager.coordinator.single_type_managers:
            assert set(single.req_to_blocks) <= set(self.scheduler.requests), "blocks of the dead"
            for blocks in single.req_to_blocks.values():
                for block in blocks:
                    if not block.is_null:
                        references[block.block_id] = references.get(block.block_id, 0) + 1
        pool = manager.block_pool
        for block in pool.blocks:
            if not block.is_null:
                assert block.ref_cnt == references.get(block.block_id, 0), block
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1 - len(references)


def make_core(config: VllmConfig, log_stats: bool = True, **worker: Any) -> EngineCore:
    """An engine core on a null worker with the given options."""
    config.parallel_config.worker_cls = partial(NullWorker, check=True, **worker)
    return EngineCore(config, UniProcExecutor, log_stats)
