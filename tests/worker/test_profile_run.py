# SPDX-License-Identifier: Apache-2.0
"""The dummy run of the largest step, and a worker that sizes its cache by it, on a CPU."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from memory_readings import GIB, Readings, free

from vllmx import SamplingParams
from vllmx.config import finalize
from vllmx.engine.arg_utils import engine_args_to_config
from vllmx.engine.startup import resolve_scheduler_limits
from vllmx.exceptions import UserError
from vllmx.model_loader.resolve import resolve_model
from vllmx.worker import gpu_worker
from vllmx.worker.attn_utils import cache_layers
from vllmx.worker.gpu_worker import Worker
from vllmx.worker.profile_run import largest_step, profile_run

LIMITS = {"max_model_len": 48, "max_num_seqs": 6, "max_num_batched_tokens": 50}


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / request.param
    save_tiny(request.param, path)
    return path


def config_of(folder, **kwargs):
    settings = {**LIMITS, "skip_tokenizer_init": True, **kwargs}
    run = engine_args_to_config(model=str(folder), **settings)
    run.load.use_tqdm_on_load, run.device.num_threads = False, 1
    config = finalize(run)
    resolve_model(config)
    resolve_scheduler_limits(config)
    return config


def as_tuple(cache: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return cache if isinstance(cache, tuple) else (cache,)


def worker_of(folder, **kwargs) -> Worker:
    worker = Worker(config_of(folder, **kwargs))
    worker.init_device()
    worker.load_model()
    return worker


@pytest.mark.parametrize(
    ("limits", "lengths"),
    [
        ({}, [9, 9, 8, 8, 8, 8]),
        ({"max_num_seqs": 50}, [1] * 50),
        ({"max_num_seqs": 1}, [47]),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 500}, [47, 47]),
    ],
)
def test_the_largest_step_is_as_large_as_the_limits_allow(folder, limits, lengths) -> None:
    step = largest_step(config_of(folder, **limits), [16])
    assert list(step.num_scheduled_tokens.values()) == lengths
    assert step.total_num_scheduled_tokens == sum(lengths)
    for data, length in zip(step.scheduled_new_reqs, lengths, strict=True):
        assert len(data.prompt_token_ids) == length
        assert data.block_ids == ([1] * -(-(length + 1) // 16),)
        assert 0 <= max(data.prompt_token_ids) < VOCAB


def test_it_runs_the_model_and_the_sampler_at_that_size(folder, monkeypatch) -> None:
    worker = worker_of(folder)
    runner = worker.model_runner
    seen: dict[str, list] = {"tokens": [], "logits": []}
    forward, logits = runner.model.forward, runner.model.compute_logits
    monkeypatch.setattr(
        runner.model,
        "forward",
        lambda ids, positions: seen["tokens"].append(len(ids)) or forward(ids, positions),
    )
    monkeypatch.setattr(
        runner.model,
        "compute_logits",
        lambda hidden: seen["logits"].append(len(hidden)) or logits(hidden),
    )
    assert profile_run(runner) == 50
    assert seen == {"tokens": [50], "logits": [6]}
    rows = runner.sampler.sampling_states
    assert rows.max_num_logprobs(torch.arange(6).numpy()) == 20


def test_nothing_is_left_of_it_and_answers_are_the_same(folder) -> None:
    prompts = [{"prompt_token_ids": [3, 9, 4 + i]} for i in range(4)]
    params = [
        SamplingParams(temperature=0.9, seed=None if i % 2 else i, max_tokens=6, ignore_eos=True)
        for i in range(4)
    ]

    def answers(llm) -> list:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    want = answers(build_engine(folder, **LIMITS))
    llm = build_engine(folder, **LIMITS)
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.model_runner
    profile_run(runner)
    layers = cache_layers(runner.model).values()
    tensors = [t for layer in layers for t in as_tuple(layer.kv_cache)]
    caches = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
    del tensors
    tables = weakref.ref(runner.block_tables)
    runner.release_kv_cache()
    gc.collect()
    assert tables() is None and all(cache() is None for cache in caches)
    assert not any(hasattr(layer, "kv_cache") for layer in layers)
    runner.initialize_kv_cache(core.kv_cache_config)
    assert answers(llm) == want


def test_a_worker_sizes_the_cache_by_it(folder, monkeypatch) -> None:
    worker = worker_of(folder, gpu_memory_utilization=0.5)
    memory = Readings(
        free(78),  # at the start
        free(70, torch_memory=6, allocated=6),  # before the largest step
        free(66, torch_memory=9, allocated=7, torch_peak=9.5),  # after it
        free(68, torch_memory=6, allocated=6),  # when it has been let go
    )
    worker.start_measuring(memory)
    assert worker.requested_memory == 40 * GIB
    worker.weights_memory = 6 * GIB
    monkeypatch.setattr(worker.model_runner, "profile_cudagraph_memory", lambda: 2 * GIB)
    # 40 less 6 of weights, 3.5 of the step, 4 that are not torch's, 2 of graphs.
    assert worker.determine_available_memory() == int(24.5 * GIB)
    order = ["release", "snapshot", "release", "reset_peak", *["snapshot"] * 2, "release"]
    assert memory.calls == [*order, "snapshot"]
    assert "kv_cache 24.50 GiB" in str(worker.memory_profile)
    assert not hasattr(worker.model_runner, "req_states")


def test_bytes_that_are_given_win_and_the_step_is_run_all_the_same(folder, monkeypatch) -> None:
    worker = worker_of(folder, kv_cache_memory_bytes=123456)
    # Too little for the share of the device, which is not asked for.
    worker.start_measuring(Readings(free(1)))
    ran = []
    monkeypatch.setattr(
        gpu_worker, "profile_run", lambda runner: ran.append(runner) or profile_run(runner)
    )
    assert worker.determine_available_memory() == 123456
    assert ran and worker.memory_profile is not None


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("load_model", "while loading the weights"),
        ("execute_model", "while running the largest step"),
        ("profile_cudagraph_memory", "while capturing CUDA graphs"),
        ("capture_model", "while capturing CUDA graphs"),
    ],
)
def test_running_out_of_memory_names_the_stage(folder, monkeypatch, method, words) -> None:
    worker = worker_of(folder)
    worker.start_measuring(Readings(free(79)))

    def too_much(*args):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(worker.model_runner, method, too_much)
    with pytest.raises(UserError, match=f"Out of GPU memory {words}.*79.00 of 80.00 GiB free"):
        if method == "load_model":
            worker.load_model()
        worker.determine_available_memory()
        worker.compile_or_warm_up_model()


def test_allocating_too_large_a_cache_is_named(folder, monkeypatch) -> None:
    worker = worker_of(folder)
    worker.start_measuring(Readings(free(79)))

    def too_much(config):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(worker.model_runner, "initialize_kv_cache", too_much)
    with pytest.raises(UserError, match=r"allocating the KV cache.*gpu_memory_utilization \(now"):
        worker.initialize_from_config(SimpleNamespace())
