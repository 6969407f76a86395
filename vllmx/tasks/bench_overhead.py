# SPDX-License-Identifier: Apache-2.0
"""What the engine itself costs: a decode step of N running requests on a worker without a model.

A step is schedule, the null runner, update and output processing; the time is per request.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

from vllmx.config import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    RunConfig,
    VllmConfig,
    finalize,
)
from vllmx.engine import EngineCoreRequest
from vllmx.engine.core import EngineCore
from vllmx.engine.executor import Executor
from vllmx.engine.output_processor import OutputProcessor
from vllmx.gc_utils import freeze_gc_heap, unfreeze_gc_heap
from vllmx.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer

NULL_WORKER = "vllmx.worker.null_runner.NullWorker"


def measure_overhead(config: RunConfig) -> dict[str, Any]:
    """Microseconds a request a step at bench.batch_size running requests over output_len steps.

    `detokenize` needs a tokenizer and so a model; it is null without one.
    """
    tokenizer = None
    if config.model.model or config.model.source is not None:
        tokenizer = tokenizer_of(config)
    results: dict[str, Any] = {
        "num_running": config.bench.batch_size,
        "num_steps": config.bench.output_len,
        "us_per_request_step": {"no_detokenize": _measure(config, None), "detokenize": None},
    }
    if tokenizer is not None and not config.bench.disable_detokenize:
        results["us_per_request_step"]["detokenize"] = _measure(config, tokenizer)
    for name, value in results["us_per_request_step"].items():
        if value is not None:
            print(f"vllmx: {value:.1f} us a request a step ({name})", file=sys.stderr)
    return results


def tokenizer_of(config: RunConfig) -> Tokenizer | None:
    """The tokenizer of the config's model."""
    from vllmx.model_loader.resolve import resolve_model
    from vllmx.model_loader.tokenizer import get_tokenizer

    vllm_config = finalize(config)
    resolve_model(vllm_config)
    return get_tokenizer(vllm_config)


def null_config(config: RunConfig) -> VllmConfig:
    """The scheduler and cache of `config` over the null worker, with room for every request."""
    bench = config.bench
    vllm_config = finalize(config)
    vllm_config.parallel_config.worker_cls = NULL_WORKER
    vllm_config.model_config.max_model_len_pinned = True
    scheduler = vllm_config.scheduler_config
    scheduler.max_num_seqs = max(scheduler.max_num_seqs, bench.batch_size)
    budget = scheduler.max_num_batched_tokens or DEFAULT_MAX_NUM_BATCHED_TOKENS
    budget = max(budget, scheduler.max_num_seqs)
    scheduler.max_num_batched_tokens = budget
    # The first requests decode while the last ones still prefill.
    prefill_steps = bench.batch_size * (bench.input_len + 1) // budget + 2
    length = bench.input_len + bench.output_len + 2 * prefill_steps
    vllm_config.model_config.max_model_len = length
    cache = vllm_config.cache_config
    block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    cache.num_gpu_blocks_override = bench.batch_size * (length // block_size + 2) + 1
    return vllm_config


def _measure(config: RunConfig, tokenizer: Tokenizer | None) -> float:
    """The median over bench.num_iters runs."""
    iterations = config.bench.num_iters_warmup + config.bench.num_iters
    runs = [step_seconds(config, tokenizer) for _ in range(iterations)]
    median = statistics.median(runs[config.bench.num_iters_warmup :])
    return median / config.bench.batch_size * 1e6


def step_seconds(config: RunConfig, tokenizer: Tokenizer | None) -> float:
    """Mean seconds of a step over bench.output_len steps of a new engine; detokenizes if it can."""
    vllm_config = null_config(config)
    core = EngineCore(vllm_config, Executor.get_class(vllm_config), log_stats=False)
    try:
        seconds = _decode(core, OutputProcessor(tokenizer, log_stats=False), config)
    finally:
        core.shutdown()
    return seconds / config.bench.output_len


def _decode(core: EngineCore, processor: OutputProcessor, config: RunConfig) -> float:
    """Seconds of bench.output_len decode steps with every request running."""
    bench = config.bench
    for index in range(bench.batch_size):
        request = _request(index, bench.input_len, processor)
        processor.add_request(request, prompt=None)
        core.add_request(*core.preprocess_add_request(request))
    while core.scheduler.get_request_counts() != (bench.batch_size, 0) or _prefilling(processor):
        _step(core, processor)
    freeze_gc_heap()  # as a worker with a model does
    start = time.perf_counter()
    for _ in range(bench.output_len):
        _step(core, processor)
    seconds = time.perf_counter() - start
    unfreeze_gc_heap()
    return seconds


def _prefilling(processor: OutputProcessor) -> bool:
    return any(state.is_prefilling for state in processor.request_states.values())


def _step(core: EngineCore, processor: OutputProcessor) -> None:
    outputs, _ = core.step()
    for client_outputs in outputs.values():
        processor.process_outputs(client_outputs.outputs, client_outputs.timestamp)


def _request(number: int, input_len: int, processor: OutputProcessor) -> EngineCoreRequest:
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=1 << 30,  # until max_model_len
        detokenize=processor.tokenizer is not None,
        output_kind=RequestOutputKind.DELTA,
    )
    return EngineCoreRequest(
        request_id=str(number),
        external_req_id=str(number),
        prompt_token_ids=[3 + (number * 31 + position) % 89 for position in range(input_len)],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
