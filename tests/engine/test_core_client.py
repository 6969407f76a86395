# SPDX-License-Identifier: Apache-2.0
"""The engine core in a thread, behind the client of an event loop."""

import asyncio
import gc
import threading
import time
from functools import partial

import pytest
from engine_helpers import make_config, make_engine_request

from vllmx.engine import EngineCoreOutputs, EngineCoreRequestType, FinishReason
from vllmx.engine.core_client import EngineCoreClient
from vllmx.engine.executor import UniProcExecutor
from vllmx.engine.mailbox import AsyncMailbox
from vllmx.engine.thread_client import AsyncThreadClient
from vllmx.exceptions import EngineDeadError, UserError
from vllmx.worker.null_runner import NullWorker


def make_client(log_stats=True, delay=0.0, fail_at_step=None, **settings):
    config = make_config(**{"num_blocks": 200, "max_model_len": 128, **settings})
    config.parallel_config.worker_cls = partial(
        NullWorker, check=True, delay=delay, fail_at_step=fail_at_step
    )
    return EngineCoreClient.make_client(False, True, config, UniProcExecutor, log_stats)


async def collect(client, finished):
    """Read outputs until the requests named in `finished` have ended: tokens, reasons."""
    tokens, reasons = {}, {}
    while not finished <= set(reasons):
        outputs = await asyncio.wait_for(client.get_output_async(), 20)
        for output in outputs.outputs:
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def run(main):
    """Run `main(client)`-like coroutines under a deadline, so that a hang is a failure."""
    return asyncio.run(asyncio.wait_for(main, 60))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_concurrent_requests_get_their_tokens(async_scheduling):
    client = make_client(async_scheduling=async_scheduling)

    async def main():
        requests = [make_engine_request(f"r{i}", 5 + i, max_tokens=6) for i in range(12)]
        await asyncio.gather(*(client.add_request_async(request) for request in requests))
        return await collect(client, {f"r{i}" for i in range(12)})

    tokens, reasons = run(main())
    assert tokens == {f"r{i}": [3 + p for p in range(5 + i, 11 + i)] for i in range(12)}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    client.shutdown()
    assert not client.is_alive


def test_client_serves_one_loop_after_another():
    client = make_client()
    for name in ("a", "b"):

        async def main(name=name):
            await client.add_request_async(make_engine_request(name, max_tokens=2))
            return await collect(client, {name})

        assert len(run(main())[0][name]) == 2
    client.shutdown()


def test_gauges_go_to_zero_when_all_requests_are_aborted():
    client = make_client(delay=0.01)

    async def main():
        names = [f"r{i}" for i in range(20)]
        for name in names:
            await client.add_request_async(make_engine_request(name, max_tokens=100))
        stats = (await client.get_output_async()).scheduler_stats
        assert stats.num_running_reqs > 0
        await client.abort_requests_async(names)
        while True:
            stats = (await asyncio.wait_for(client.get_output_async(), 10)).scheduler_stats
            gauges = (stats.num_running_reqs, stats.num_waiting_reqs, stats.kv_cache_usage)
            if gauges == (0, 0, 0.0):
                return

    run(main())
    client.shutdown()


def test_aborts_from_many_tasks_at_any_time_leave_the_engine_well():
    client = make_client(delay=0.002, num_blocks=40)

    async def main():
        names = [f"r{i}" for i in range(30)]

        async def abort(name, after):
            await asyncio.sleep(after)
            await client.abort_requests_async([name, "unknown"])
            await client.abort_requests_async([name])

        aborting = [abort(name, 0.003 * i) for i, name in enumerate(names[:15])]
        for name in names:
            await client.add_request_async(make_engine_request(name, max_tokens=20))
        *_, (tokens, _) = await asyncio.gather(*aborting, collect(client, set(names[15:])))
        assert all(len(tokens[name]) == 20 for name in names[15:])
        assert await client.reset_prefix_cache_async()  # no block is held any more

    run(main())
    client.shutdown()


def test_abort_then_add_of_the_same_id_in_one_breath_runs_the_new_request():
    client = make_client(delay=0.01)

    async def main():
        await client.add_request_async(make_engine_request("a", 5, max_tokens=50))
        await client.get_output_async()
        await client.abort_requests_async(["a"])
        await client.add_request_async(make_engine_request("a", 9, max_tokens=2))
        tokens, reasons = await collect(client, {"a"})
        assert tokens["a"][-2:] == [12, 13] and reasons["a"] == FinishReason.LENGTH

    run(main())
    client.shutdown()


def test_bad_requests_fail_alone():
    client = make_client(delay=0.01)

    async def main():
        bad = make_engine_request("bad")
        bad.pooling_params = object()
        with pytest.raises(ValueError, match="pooling"):
            await client.add_request_async(bad)
        await client.add_request_async(make_engine_request("a", max_tokens=8))
        # The same id again: the second one is answered with an error.
        await client.add_request_async(make_engine_request("a", max_tokens=8))
        _, reasons = await collect(client, {"a"})
        assert reasons["a"] == FinishReason.ERROR
        await client.add_request_async(make_engine_request("b", max_tokens=3))
        tokens, _ = await collect(client, {"b"})
        assert len(tokens["b"]) == 3

    run(main())
    client.shutdown()


def test_utility_calls_return_results_and_failures():
    client = make_client()

    async def main():
        assert await client.reset_prefix_cache_async() is True
        assert await client.is_scheduler_paused_async() is False
        assert len(await client.collective_rpc_async("get_kv_cache_spec")) == 1
        with pytest.raises(RuntimeError, match="Call to no_such_method method failed"):
            await client.call_utility_async("no_such_method")
        assert client.is_alive

    run(main())
    client.shutdown()


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_modes(mode):
    client = make_client(delay=0.005)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=10))
        await client.get_output_async()
        await client.pause_scheduler_async(mode)
        assert await client.is_scheduler_paused_async()
        await client.add_request_async(make_engine_request("b", max_tokens=2))
        await asyncio.sleep(0.05)
        await client.resume_scheduler_async()
        tokens, reasons = await collect(client, {"a", "b"})
        assert reasons["a"] == (FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH)
        assert len(tokens["b"]) == 2
        with pytest.raises(RuntimeError, match="Invalid pause mode"):
            await client.pause_scheduler_async("soon")

    run(main())
    client.shutdown()


# ---------------------------------------------------------------- death


def test_everybody_learns_of_a_crash_and_its_cause():
    client = make_client(fail_at_step=3, delay=0.02)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=50))

        async def read():
            while True:
                await client.get_output_async()

        async def call():
            while True:
                await client.is_scheduler_paused_async()
                await asyncio.sleep(0)

        results = await asyncio.gather(read(), read(), call(), return_exceptions=True)
        for error in results:
            assert isinstance(error, EngineDeadError) and "scripted failure" in str(error)
            assert isinstance(error.__cause__, RuntimeError)
        assert len({id(error) for error in results}) == 3
        with pytest.raises(EngineDeadError, match="scripted failure"):
            await client.add_request_async(make_engine_request("late"))
        with pytest.raises(EngineDeadError):
            await client.get_output_async()
        with pytest.raises(EngineDeadError):
            await client.reset_prefix_cache_async()
        await client.abort_requests_async(["a"])  # nobody to tell, nothing to raise

    run(main())
    assert not client.is_alive and isinstance(client.dead_error, EngineDeadError)
    client.shutdown()


def test_crash_before_anybody_waits_is_not_lost():
    client = make_client(fail_at_step=1)

    async def main():
        await client.add_request_async(make_engine_request("a"))

    run(main())
    client._thread.join(10)

    async def later():
        with pytest.raises(EngineDeadError, match="scripted failure"):
            await client.get_output_async()

    run(later())


def test_outputs_for_a_loop_that_has_stopped_reach_the_next_one():
    mailbox = AsyncMailbox()

    async def bind_and_get():
        mailbox.bind()
        return await asyncio.wait_for(mailbox.queue.get(), 5)

    first, second, third = (EngineCoreOutputs(engine_index=i) for i in range(3))
    loop = asyncio.new_event_loop()
    mailbox.send(0, first)
    assert loop.run_until_complete(bind_and_get()) is first
    mailbox.send(0, second)  # the loop does not run, but isn't closed yet
    loop.close()
    mailbox.send(0, third)
    mailbox.close(None)

    async def rest():
        return [await bind_and_get() for _ in range(3)]

    assert run(rest()) == [second, third, None]


def test_failed_start_is_raised_where_the_client_is_made():
    before = set(threading.enumerate())
    with pytest.raises(UserError, match="999"):
        make_client(num_blocks=5, max_model_len=999)
    for thread in set(threading.enumerate()) - before:
        thread.join(5)
        assert not thread.is_alive()


# ---------------------------------------------------------------- shutdown


def test_shutdown_drains_within_its_timeout_and_refuses_newcomers():
    client = make_client(delay=0.01)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=15))
        await client.get_output_async()
        ending = asyncio.create_task(client.shutdown_async(timeout=20))
        await asyncio.sleep(0.03)
        await client.add_request_async(make_engine_request("late"))
        tokens, reasons = await collect(client, {"a", "late"})
        assert reasons == {"a": FinishReason.LENGTH, "late": FinishReason.ABORT}
        assert "late" not in tokens or tokens["late"] == []
        await ending
        with pytest.raises(EngineDeadError, match="shut down"):
            while True:  # statistics may be left
                await client.get_output_async()
        with pytest.raises(EngineDeadError, match="shut down"):
            await client.add_request_async(make_engine_request("later"))

    run(main())


@pytest.mark.parametrize("timeout", [None, 0.05])
def test_shutdown_aborts_what_is_not_done_in_time(timeout):
    client = make_client(delay=0.01)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=110))
        await client.get_output_async()
        start = time.monotonic()
        await client.shutdown_async(timeout)
        assert time.monotonic() - start < 5
        _, reasons = await collect(client, {"a"})
        assert reasons == {"a": FinishReason.ABORT}

    run(main())


def test_shutdown_of_a_frozen_engine_does_not_wait():
    client = make_client()

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=110))
        await client.pause_scheduler_async("keep")
        start = time.monotonic()
        await client.shutdown_async(30)
        assert time.monotonic() - start < 5
        _, reasons = await collect(client, {"a"})
        assert reasons == {"a": FinishReason.ABORT}

    run(main())


def test_shutdown_twice_and_after_a_crash_is_harmless():
    client = make_client()
    client.shutdown()
    client.shutdown(1.0)


def test_forgotten_client_takes_its_thread_along():
    client = make_client()
    thread = client._thread
    assert isinstance(client, AsyncThreadClient) and thread.is_alive()
    del client
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_message_types_have_upstreams_bytes():
    # 2 starts a wave of data parallelism, which is not built.
    assert [kind.value for kind in EngineCoreRequestType] == [bytes([i]) for i in (0, 1, 3, 4, 5)]
