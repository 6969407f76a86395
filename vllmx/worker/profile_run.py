# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/model_runner.py (profile_run, _dummy_run) @ v0.25.0
"""The largest step that the scheduler may ask for, run before the KV cache is there.

It goes the way of every other step, over a cache of one block that all requests share, so that
what it takes at most is what a step takes at most. Nothing of it is left behind.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import numpy as np

from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllmx.core.output import AsyncModelRunnerOutput, NewRequestData, SchedulerOutput
from vllmx.kernels.compile_ahead import compiling_ahead
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.worker.model_runner import GPUModelRunner

SHARED_BLOCK = 1
"""The one real block; 0 is the null block."""


def compile_kernels(runner: GPUModelRunner, threads: int) -> None:
    """Compile, in `threads` threads, what the largest step launches and what the steps launch that
    become CUDA graphs. Nothing is left behind."""
    with compiling_ahead(threads):
        profile_run(runner)
        runner.rehearse_cudagraphs()
    runner.release_kv_cache()


def profile_run(runner: GPUModelRunner) -> int:
    """Run the largest step of `runner`, sampling for each of its requests; the tokens it had.

    The runner has its tables and a small cache from here on, until `runner.release_kv_cache`.
    """
    runner.initialize_kv_cache(minimal_kv_cache_config(runner), is_profiling=True)
    step = largest_step(runner.vllm_config, runner.block_sizes)
    runner.execute_model(step)
    output = runner.sample_tokens(None)
    if isinstance(output, AsyncModelRunnerOutput):
        output.get_output()
    return step.total_num_scheduled_tokens


def minimal_kv_cache_config(runner: GPUModelRunner) -> KVCacheConfig:
    """A cache of the null block and one more."""
    config = copy.copy(runner.vllm_config)
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.num_gpu_blocks_override = SHARED_BLOCK + 1
    groups = get_kv_cache_groups(config, runner.get_kv_cache_spec())
    return get_kv_cache_config_from_groups(config, groups, 0)


def largest_step(vllm_config: VllmConfig, block_sizes: list[int]) -> SchedulerOutput:
    """Prompts of max_num_batched_tokens together, as many as may run, all of them at their end.

    They sample in the way that takes most: filtered, with penalties and log-probabilities.
    """
    scheduler, model = vllm_config.scheduler_config, vllm_config.model_config
    assert scheduler.max_num_batched_tokens is not None and model.max_model_len is not None
    longest = max(model.max_model_len - 1, 1)
    tokens = min(scheduler.max_num_batched_tokens, longest * scheduler.max_num_seqs)
    num_reqs = min(scheduler.max_num_seqs, tokens)
    lengths = np.full(num_reqs, tokens // num_reqs)
    lengths[: tokens % num_reqs] += 1
    vocab = model.get_vocab_size()
    wanted = vocab if model.max_logprobs < 0 else min(model.max_logprobs, vocab)
    params = SamplingParams(
        temperature=1.0,
        top_k=max(vocab // 2, 1),
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=wanted or None,
        seed=0,
        max_tokens=1,
    )
    step = SchedulerOutput.make_empty()
    for i, length in enumerate(lengths.tolist()):
        blocks = tuple([SHARED_BLOCK] * -(-(length + 1) // size) for size in block_sizes)
        name = f"profile-{i}"
        step.scheduled_new_reqs.append(
            NewRequestData(name, [i % vocab] * length, [], params, None, blocks, 0)
        )
        step.num_scheduled_tokens[name] = length
    step.total_num_scheduled_tokens = tokens
    return step
