# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

import pytest
from engine_helpers import full_spec, make_config, make_core, make_engine_request

from vllmx.core.async_scheduler import AsyncScheduler
from vllmx.core.output import AsyncModelRunnerOutput
from vllmx.core.scheduler import Scheduler
from vllmx.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from vllmx.engine.core import EngineCore
from vllmx.engine.core_client import EngineCoreClient, InprocClient
from vllmx.engine.executor import Executor, UniProcExecutor
from vllmx.engine.front import fan_out
from vllmx.engine.startup import get_scheduler_cls, resolve_scheduler_limits
from vllmx.exceptions import EngineDeadError, UserError
from vllmx.worker.null_runner import NullWorker


def add(core, request_id, *args, **kwargs):
    request = make_engine_request(request_id, *args, **kwargs)
    core.add_request(*core.preprocess_add_request(request))


def run(core, max_steps=500):
    """Step until idle: tokens and finish reasons by request."""
    tokens, reasons = {}, {}
    for _ in range(max_steps):
        outputs, executed = core.step_fn()
        for output in outputs[0].outputs if outputs else ():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = output.finish_reason
        if not executed and not core.scheduler.has_requests() and not core.batch_queue:
            return tokens, reasons
    raise AssertionError("still busy")


# ---------------------------------------------------------------- messages


def test_messages_have_upstreams_defaults_and_texts():
    assert [str(reason) for reason in FinishReason] == [
        "stop",
        "length",
        "abort",
        "error",
        "repetition",
    ]
    request = make_engine_request("a")
    assert request.params is request.sampling_params and request.client_index == 0
    assert EngineCoreOutputs().timestamp > 0 and EngineCoreOutputs().outputs == []
    assert not EngineCoreOutput("a", []).finished
    assert EngineCoreOutput("a", [], finish_reason=FinishReason.STOP).finished
    assert EngineCoreEvent.new_event(EngineCoreEventType.QUEUED, 2.0).timestamp == 2.0
    assert EngineCoreEvent.new_event(EngineCoreEventType.QUEUED).timestamp > 0


def test_engine_with_null_worker_runs_without_torch():
    code = (
        "import sys, vllmx.engine; light = {'vllmx.engine.core', 'vllmx.core.scheduler'}\n"
        "assert not light & set(sys.modules)\n"
        "import vllmx.engine.core_client, vllmx.worker.null_runner\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---------------------------------------------------------------- start


def test_start_notes_the_size_of_the_cache():
    config = make_config(num_blocks=33, max_model_len=64)
    core = make_core(config)
    cache = config.cache_config
    assert (cache.num_gpu_blocks, cache.block_size) == (33, 4)
    assert cache.kv_cache_size_tokens and cache.kv_cache_max_concurrency
    assert type(core.scheduler) is Scheduler
    core.shutdown()


def test_pinned_length_that_does_not_fit_is_refused_and_the_worker_is_shut_down():
    stopped = []

    class Worker(NullWorker):
        def shutdown(self):
            stopped.append(self)

    config = make_config(num_blocks=9, max_model_len=4096)
    config.parallel_config.worker_cls = Worker
    with pytest.raises(UserError, match="4096"):
        EngineCore(config, UniProcExecutor, True)
    assert len(stopped) == 1


def test_length_that_is_not_pinned_is_lowered_and_used_by_the_scheduler():
    config = make_config(num_blocks=9, max_model_len=4096)
    config.model_config.max_model_len_pinned = False
    core = make_core(config)
    fitted = config.model_config.max_model_len
    assert 0 < fitted <= 36 and core.scheduler.max_model_len == fitted
    add(core, "a", 8, max_tokens=4000)
    tokens, reasons = run(core)
    assert reasons == {"a": FinishReason.LENGTH} and len(tokens["a"]) <= fitted - 8


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "max_num_seqs=8"),
        ({"max_num_batched_tokens": 64, "enable_chunked_prefill": False}, "max_model_len=128"),
        ({"max_long_partial_prefills": 3}, "max_long_partial_prefills=3"),
        (
            {"max_num_partial_prefills": 2, "long_prefill_token_threshold": 999},
            "long_prefill_token_threshold=999",
        ),
        (
            {
                "max_num_partial_prefills": 2,
                "enable_chunked_prefill": False,
                "max_num_batched_tokens": 128,
            },
            "enable_chunked_prefill=true",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        resolve_scheduler_limits(make_config(**settings))


def test_limits_that_depend_on_the_model_are_filled_in():
    config = make_config(max_model_len=4000)
    config.scheduler_config.max_num_batched_tokens = None
    resolve_scheduler_limits(config)
    assert config.scheduler_config.max_num_batched_tokens == 2048
    config.scheduler_config.max_num_batched_tokens = None
    config.scheduler_config.enable_chunked_prefill = False
    resolve_scheduler_limits(config)
    assert config.scheduler_config.max_num_batched_tokens == 4000
    config = make_config(max_model_len=1000, max_num_partial_prefills=2)
    resolve_scheduler_limits(config)
    assert config.scheduler_config.long_prefill_token_threshold == 40


def test_scheduler_class_by_name_or_by_mode():
    config = make_config().scheduler_config
    assert get_scheduler_cls(config) is Scheduler
    config.async_scheduling = True
    assert get_scheduler_cls(config) is AsyncScheduler
    config.scheduler_cls = "vllmx.core.scheduler.Scheduler"
    assert get_scheduler_cls(config) is Scheduler
    for name in ("Scheduler", "vllmx.core.scheduler.Nothing", "vllmx.nothing.Scheduler"):
        config.scheduler_cls = name
        with pytest.raises(UserError, match=r"scheduler\.scheduler_cls"):
            get_scheduler_cls(config)


def test_worker_class_by_name_and_its_methods_bound_without_a_hop():
    config = make_config()
    config.parallel_config.worker_cls = "vllmx.worker.null_runner.NullWorker"
    executor = UniProcExecutor(config)
    runner = executor.driver_worker.model_runner
    assert executor.execute_model == runner.execute_model
    assert executor.collective_rpc(lambda worker, x: x + 1, args=(2,)) == [3]
    executor.check_health()
    config.parallel_config.worker_cls = "vllmx.worker.null_runner.Nothing"
    with pytest.raises(UserError, match=r"parallel\.worker_cls"):
        UniProcExecutor(config)


def test_unknown_executor_is_refused():
    config = make_config()
    assert Executor.get_class(config) is UniProcExecutor
    config.parallel_config.distributed_executor_backend = "ray"
    with pytest.raises(UserError, match="only uni is built"):
        Executor.get_class(config)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_all_requests_get_their_tokens(async_scheduling, caching):
    core = make_core(make_config(num_blocks=40, caching=caching, async_scheduling=async_scheduling))
    for i in range(20):
        add(core, f"r{i}", 5 + i, max_tokens=7)
    tokens, reasons = run(core)
    assert tokens == {f"r{i}": [3 + p for p in range(5 + i, 12 + i)] for i in range(20)}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert core.step_fn() == ({}, False)


def test_results_that_are_still_on_their_way_are_waited_for():
    class Late(AsyncModelRunnerOutput):
        def __init__(self, output):
            self.output = output

        def get_output(self):
            return self.output

    class Worker(NullWorker):
        def __init__(self, config):
            super().__init__(config, check=True)
            self.sample_tokens = lambda grammar: Late(self.model_runner.sample_tokens(grammar))

    config = make_config(async_scheduling=True)
    config.parallel_config.worker_cls = Worker
    core = EngineCore(config, UniProcExecutor, True)
    add(core, "a", 5, max_tokens=6)
    assert run(core)[0] == {"a": [8, 9, 10, 11, 12, 13]}


@pytest.mark.parametrize("moment", ["before", "inside", "after"])
def test_abort_at_any_moment_of_a_step_is_idempotent(moment):
    core = make_core(make_config())

    def abort():
        core.abort_requests(["a", "nobody"])
        core.abort_requests(["a"])

    for name in "ab":
        add(core, name, 6, max_tokens=3)
    if moment == "before":
        abort()
    execute = core.model_executor.execute_model

    def execute_and_abort(scheduler_output):
        result = execute(scheduler_output)
        if moment == "inside":
            abort()
        return result

    core.model_executor.execute_model = execute_and_abort
    core.step()
    core.model_executor.execute_model = execute
    if moment == "after":
        abort()
    tokens, reasons = run(core)
    assert set(reasons) == {"b"} and "a" not in tokens
    assert core.scheduler.kv_cache_manager.usage == 0.0
    add(core, "a", 6, max_tokens=3)
    assert run(core)[1] == {"a": FinishReason.LENGTH}


def test_unsupported_requests_are_refused_when_they_arrive():
    core = make_core(make_config())
    request = make_engine_request("a")
    request.pooling_params = object()
    with pytest.raises(ValueError, match="pooling"):
        core.preprocess_add_request(request)
    request, _ = core.preprocess_add_request(make_engine_request("a"))
    request.request_id = 7
    with pytest.raises(TypeError, match="request_id must be a string"):
        core.add_request(request)


def test_pause_keeps_or_ends_requests_and_resume_goes_on():
    core = make_core(make_config())
    add(core, "a", 5, max_tokens=6)
    core.step()
    core.pause_scheduler("keep")
    assert core.is_scheduler_paused() and core.step() == ({}, False)
    core.resume_scheduler()
    assert len(run(core)[0]["a"]) == 5
    add(core, "b", 5, max_tokens=6)
    core.step()
    core.pause_scheduler("abort")
    core.resume_scheduler()
    assert run(core) == ({}, {})
    with pytest.raises(ValueError, match="'wait' mode"):
        core.pause_scheduler("wait")
    with pytest.raises(ValueError, match="Invalid pause mode"):
        core.pause_scheduler("soon")


def test_prefix_cache_can_be_reset_between_requests():
    core = make_core(make_config())
    prompt = list(range(20))
    for expected_hits in (0, 16, 0):
        add(core, "a", prompt, max_tokens=1)
        outputs, _ = core.step()
        assert outputs[0].outputs[0].prefill_stats.num_cached_tokens == expected_hits
        if expected_hits:
            assert core.reset_prefix_cache()


# ---------------------------------------------------------------- in-process client


def test_inproc_client_steps_on_demand():
    client = EngineCoreClient.make_client(False, False, make_config(), UniProcExecutor, True)
    assert isinstance(client, InprocClient)
    client.add_request(make_engine_request("a", 5, max_tokens=2))
    assert client.get_output().outputs[0].new_token_ids == [8]
    client.abort_requests(["a"])
    client.abort_requests([])
    assert client.get_output().outputs == []
    assert client.reset_prefix_cache()
    assert client.collective_rpc("get_kv_cache_spec") == [{"layers.0": full_spec(4)}]
    client.shutdown()


def test_inproc_client_is_dead_after_a_failed_step():
    config = make_config()
    config.parallel_config.worker_cls = lambda c: NullWorker(c, fail_at_step=2)
    client = InprocClient(config, UniProcExecutor, True)
    client.add_request(make_engine_request("a", 5, max_tokens=9))
    client.get_output()
    with pytest.raises(RuntimeError, match="scripted failure"):
        client.get_output()
    for call in (client.get_output, lambda: client.add_request(make_engine_request("b"))):
        with pytest.raises(EngineDeadError, match="scripted failure") as caught:
            call()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_inproc_client_that_was_shut_down_says_so():
    client = InprocClient(make_config(), UniProcExecutor, True)
    client.shutdown()
    client.shutdown()
    for call in (client.get_output, lambda: client.add_request(make_engine_request("b"))):
        with pytest.raises(EngineDeadError, match="has been shut down"):
            call()


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


def owner_of(core, method):
    """The object of an engine core that has `method`."""
    parts = (core, core.scheduler, core.scheduler.kv_cache_manager.coordinator, core.model_executor)
    return next(part for part in reversed(parts) if hasattr(part, method))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize(
    "method",
    ["schedule", "cache_blocks", "allocate_new_blocks", "execute_model", "sample_tokens",
     "_wait_for", "update_from_output"],
)  # fmt: skip
def test_interrupted_step_leaves_nothing_wrong_in_the_caches(method, async_scheduling, monkeypatch):
    """The same prompts as before the interruption, when the runner checks what it reads."""
    config = make_config(max_num_seqs=3, async_scheduling=async_scheduling)
    client = InprocClient(config, UniProcExecutor, True)
    core = client.engine_core
    prompts = {name: [100 * i + p for p in range(20)] for i, name in enumerate("abc")}

    def add_all(max_tokens):
        for name, prompt in prompts.items():
            client.add_request(make_engine_request(name, prompt, max_tokens))

    # Ended requests that the runner hears of only in the step that is interrupted.
    add_all(max_tokens=1)
    while core.scheduler.has_unfinished_requests():
        client.get_output()
    core.reset_prefix_cache()
    for _ in range(3):
        add_all(max_tokens=5)
        with monkeypatch.context() as patch:
            patch.setattr(owner_of(core, method), method, interrupt)
            with pytest.raises(KeyboardInterrupt):
                while True:
                    client.get_output()
        assert not core.scheduler.has_unfinished_requests()
        assert core.scheduler.kv_cache_manager.usage == 0.0
        client.abort_requests(list(prompts))
    add_all(max_tokens=5)
    tokens, _ = run(core)
    assert tokens == {name: [23, 24, 25, 26, 27] for name in prompts}


def test_second_interruption_while_the_first_is_cleared_up_ends_the_engine(monkeypatch):
    client = InprocClient(make_config(), UniProcExecutor, True)
    client.add_request(make_engine_request("a"))
    monkeypatch.setattr(client.engine_core.model_executor, "execute_model", interrupt)
    monkeypatch.setattr(client.engine_core.model_executor, "collective_rpc", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.get_output()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        client.get_output()


def test_interruption_keeps_the_pause():
    client = InprocClient(make_config(), UniProcExecutor, True)
    client.engine_core.pause_scheduler("keep")
    client.engine_core.start_over()
    assert client.engine_core.is_scheduler_paused()


def test_answers_to_one_prompt_are_hashed_once():
    config = make_config()
    core = make_core(config)
    hashed = []
    hasher = core.request_block_hasher

    def counting(request):
        hashes = hasher(request)
        hashed.extend(hashes)
        return hashes

    core.request_block_hasher = counting
    parent = make_engine_request("a", list(range(40)), max_tokens=9, n=50, temperature=1.0)
    parent.external_req_id = "a"
    requests = []
    for child, _, _ in fan_out(parent):
        requests.append(core.preprocess_add_request(child)[0])
        core.add_request(requests[-1])
        core.step()  # some answers go on while others are still to come
    assert len(requests) == 50
    alone, _ = core.preprocess_add_request(make_engine_request("b", list(range(40))))
    assert all(request.block_hashes[:10] == alone.block_hashes for request in requests)
    with_output = sum(len(request.block_hashes) - 10 for request in requests)
    assert with_output > 0 and len(hashed) == 2 * 10 + with_output
