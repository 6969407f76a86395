# SPDX-License-Identifier: Apache-2.0
"""Clients of an engine core in a process of its own, while all is well."""

import asyncio
import os
import random
import threading

import pytest
import zmq
from engine_helpers import make_engine_request
from msgspec import msgpack
from process_helpers import (
    LogprobsWorker,
    collect,
    is_running,
    make_mp_client,
    process_config,
    process_of,
    run,
)

from vllmx.core.output import LogprobsLists
from vllmx.engine import EngineCoreOutputs, EngineCoreReadyResponse, FinishReason
from vllmx.engine.core_client import AsyncMPClient, EngineCoreClient, MPClient, SyncMPClient
from vllmx.engine.core_proc import EngineCoreProc
from vllmx.engine.executor import UniProcExecutor
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.engine.utils import make_zmq_socket
from vllmx.exceptions import EngineDeadError
from vllmx.sampling_params import SamplingParams

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def client():
    """One engine for all tests that leave it as it was; one loop after another uses it."""
    client = make_mp_client(True, delay=0.002)
    yield client
    client.shutdown()


@pytest.fixture(scope="module")
def sync_client():
    client = make_mp_client(False, LogprobsWorker, caching=False)
    yield client
    client.shutdown()


def read(client, finished):
    """Outputs of a blocking client by request, until those named in `finished` have ended."""
    outputs = {}
    while not all(name in outputs and outputs[name][-1].finished for name in finished):
        for output in client.get_output().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


def test_client_takes_over_what_the_engine_filled_in():
    config = process_config(num_blocks=9, max_model_len=4096)
    config.model_config.max_model_len_pinned = False
    config.scheduler_config.max_num_batched_tokens = None
    client = EngineCoreClient.make_client(True, True, config, UniProcExecutor, True)
    assert isinstance(client, AsyncMPClient) and isinstance(client, MPClient)
    assert config.cache_config.num_gpu_blocks == 9
    assert 0 < config.model_config.max_model_len <= 36
    assert config.cache_config.kv_cache_size_tokens and config.cache_config.kv_cache_max_concurrency
    assert config.scheduler_config.max_num_batched_tokens == 2048
    folder, pid = client.resources.folder, process_of(client).pid
    assert folder.stat().st_mode & 0o077 == 0  # nobody else's
    client.shutdown()
    assert not folder.exists() and not is_running(pid)
    assert not client.is_alive


def test_concurrent_requests_get_their_tokens_in_one_loop_after_another(client):
    async def main(prefix):
        requests = [make_engine_request(f"{prefix}{i}", 5 + i, max_tokens=6) for i in range(12)]
        await asyncio.gather(*(client.add_request_async(request) for request in requests))
        return await collect(client, {request.request_id for request in requests})

    for prefix in "rs":
        tokens, reasons = run(main(prefix))
        assert tokens == {f"{prefix}{i}": [3 + p for p in range(5 + i, 11 + i)] for i in range(12)}
        assert set(reasons.values()) == {FinishReason.LENGTH}


def test_aborts_at_any_time_lose_nothing(client):
    rng = random.Random(3)

    async def main():
        names = [f"a{i}" for i in range(30)]

        async def abort(name):
            await asyncio.sleep(rng.random() * 0.05)
            await client.abort_requests_async([name, "unknown"])
            await client.abort_requests_async([name])

        aborting = [abort(name) for name in names[:15]]
        for name in names:
            await client.add_request_async(make_engine_request(name, max_tokens=20))
        *_, (tokens, _) = await asyncio.gather(*aborting, collect(client, set(names[15:])))
        assert all(len(tokens[name]) == 20 for name in names[15:])
        assert await client.reset_prefix_cache_async()  # no block is held any more

    run(main())


def test_abort_then_add_of_the_same_id_in_one_breath_runs_the_new_request(client):
    async def main():
        await client.add_request_async(make_engine_request("same", 5, max_tokens=50))
        await client.get_output_async()
        await client.abort_requests_async(["same"])
        await client.add_request_async(make_engine_request("same", 9, max_tokens=2))
        tokens, reasons = await collect(client, {"same"})
        assert tokens["same"][-2:] == [12, 13] and reasons["same"] == FinishReason.LENGTH

    run(main())


def test_bad_requests_fail_alone(client):
    async def main():
        bad = make_engine_request("bad")
        bad.pooling_params = object()
        with pytest.raises(ValueError, match="pooling"):
            await client.add_request_async(bad)
        unsendable = make_engine_request("bad", extra_args={"x": object()})
        with pytest.raises(TypeError, match="cannot be sent"):
            await client.add_request_async(unsendable)
        # Checks that only the engine makes, and a message that is none: answered with an error.
        unreadable = make_engine_request("unreadable")
        unreadable.sampling_params.temperature = -5.0
        await client.add_request_async(unreadable)
        for _ in range(2):
            await client.add_request_async(make_engine_request("twice", max_tokens=80))
        _, reasons = await collect(client, {"unreadable", "twice"})
        assert set(reasons.values()) == {FinishReason.ERROR}
        await client.abort_requests_async(["twice"])
        await client.add_request_async(make_engine_request("good", max_tokens=3))
        outputs = (await collect(client, {"good"}))[0]
        assert len(outputs["good"]) == 3

    run(main())


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_pause_modes(client, mode):
    async def main():
        await client.add_request_async(make_engine_request(f"{mode}1", max_tokens=10))
        await client.get_output_async()
        await client.pause_scheduler_async(mode)
        assert await client.is_scheduler_paused_async()
        await client.add_request_async(make_engine_request(f"{mode}2", max_tokens=2))
        await asyncio.sleep(0.05)
        await client.resume_scheduler_async()
        tokens, reasons = await collect(client, {f"{mode}1", f"{mode}2"})
        expected = FinishReason.ABORT if mode == "abort" else FinishReason.LENGTH
        assert reasons[f"{mode}1"] == expected
        assert len(tokens[f"{mode}2"]) == 2
        with pytest.raises(RuntimeError, match="Invalid pause mode"):
            await client.pause_scheduler_async("soon")

    run(main())


def test_cancelled_utility_call_leaves_the_engine_well(client):
    async def main():
        call = asyncio.create_task(client.pause_scheduler_async("keep"))
        await asyncio.sleep(0)
        call.cancel()
        await client.resume_scheduler_async()
        assert await client.is_scheduler_paused_async() is False

    run(main())


def test_answers_of_the_engine_come_back_to_who_asked(client):
    async def main():
        calls = [client.call_utility_async("is_scheduler_paused") for _ in range(20)]
        calls += [client.reset_prefix_cache_async() for _ in range(20)]
        assert await asyncio.gather(*calls) == [False] * 20 + [True] * 20

    run(main())


# ---------------------------------------------------------------- blocking client


def test_blocking_client_serves_requests_and_arrays(sync_client):
    assert isinstance(sync_client, SyncMPClient)
    for name in "ab":
        sync_client.add_request(make_engine_request(name, 5, max_tokens=4, logprobs=199))
    outputs = read(sync_client, "ab")
    for name in "ab":
        assert [t for output in outputs[name] for t in output.new_token_ids] == [8, 9, 10, 11]
        for output in outputs[name]:
            assert isinstance(output.new_logprobs, LogprobsLists)
            ids = output.new_logprobs.logprob_token_ids
            assert ids.shape == (1, 200) and (output.new_logprobs.logprobs == -ids).all()


def test_blocking_client_aborts_and_goes_on(sync_client):
    sync_client.add_request(make_engine_request("long", max_tokens=100))
    sync_client.get_output()
    sync_client.abort_requests(["long", "unknown"])
    sync_client.abort_requests([])
    sync_client.add_request(make_engine_request("short", max_tokens=2))
    read(sync_client, ["short"])
    assert sync_client.reset_prefix_cache() is True


def test_blocking_client_pauses_and_resumes(sync_client):
    sync_client.pause_scheduler("keep")
    assert sync_client.is_scheduler_paused()
    sync_client.resume_scheduler()
    assert not sync_client.is_scheduler_paused()


def test_workers_are_called_by_name(sync_client):
    pid = process_of(sync_client).pid
    assert sync_client.collective_rpc("report", args=("pid",)) == [pid]
    assert sync_client.collective_rpc("report", None, ("pid",), {"extra": 1}) == [pid + 1]
    with pytest.raises(RuntimeError, match="collective_rpc method failed: no report today"):
        sync_client.collective_rpc("report", args=("fails",))
    with pytest.raises(RuntimeError, match=r"result cannot be sent.*lock"):
        sync_client.collective_rpc("report", args=("lock",))
    with pytest.raises(TypeError, match=r"cannot be sent.*allow_insecure_serialization"):
        sync_client.collective_rpc(os.getpid)
    with pytest.raises(RuntimeError, match="Call to no_such_method method failed"):
        sync_client.call_utility("no_such_method")
    assert sync_client.collective_rpc("report", args=("pid",)) == [pid]


def test_functions_and_types_travel_where_pickle_is_allowed():
    config = process_config()
    config.parallel_config.allow_insecure_serialization = True
    client = EngineCoreClient.make_client(True, False, config, UniProcExecutor, True)
    assert client.collective_rpc(max, args=({"z": 1},), kwargs={"key": str}) is not None
    (specs,) = client.collective_rpc("get_kv_cache_spec")
    assert type(specs["layers.0"]).__name__ == "FullAttentionSpec"
    client.shutdown()


# ---------------------------------------------------------------- end


def test_shutdown_drains_refuses_newcomers_and_ends_the_process():
    client = make_mp_client(True, delay=0.01)
    pid = process_of(client).pid

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=40))
        await client.get_output_async()
        ending = asyncio.create_task(client.shutdown_async(timeout=20))
        await asyncio.sleep(0.1)
        await client.add_request_async(make_engine_request("late"))
        with pytest.raises(RuntimeError, match="Server shutting down"):
            await client.is_scheduler_paused_async()
        tokens, reasons = await collect(client, {"a", "late"})
        assert reasons == {"a": FinishReason.LENGTH, "late": FinishReason.ABORT}
        assert len(tokens["a"]) >= 39 and not tokens.get("late")
        await ending
        assert not is_running(pid)
        with pytest.raises(EngineDeadError, match="shut down"):
            while True:  # statistics may be left
                await client.get_output_async()
        for call in (
            client.add_request_async(make_engine_request("later")),
            client.reset_prefix_cache_async(),
        ):
            with pytest.raises(EngineDeadError, match="shut down"):
                await call
        await client.abort_requests_async(["a"])

    run(main())


def test_shutdown_aborts_what_runs_and_may_be_called_again():
    client = make_mp_client(True, delay=0.01)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=110))
        await client.get_output_async()
        patient = asyncio.create_task(client.shutdown_async(30))
        await asyncio.sleep(0.05)
        await client.shutdown_async()  # hurries the first one
        await patient
        assert (await collect(client, {"a"}))[1] == {"a": FinishReason.ABORT}

    run(main())
    client.shutdown()


def test_engine_keeps_to_upstreams_protocol_from_hello_to_the_last_message(request, tmp_path):
    ctx = zmq.Context()
    request.addfinalizer(lambda: ctx.destroy(linger=0))
    kinds = {"handshake": zmq.ROUTER, "input": zmq.ROUTER, "output": zmq.PULL}
    paths = {name: f"ipc://{tmp_path / name}" for name in kinds}
    sockets = {name: make_zmq_socket(ctx, paths[name], kind) for name, kind in kinds.items()}

    def engine():
        core = EngineCoreProc(
            vllm_config=process_config(),
            local_client=True,
            handshake_address=paths["handshake"],
            executor_class=UniProcExecutor,
            log_stats=False,
            engine_index=1,
        )
        core.run_busy_loop()
        core.shutdown()

    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    where = {"local": True, "headless": False}

    def greeting():
        identity, content = sockets["handshake"].recv_multipart()
        assert identity == b"\x01\x00"
        return msgpack.decode(content)

    assert greeting() == {"status": "HELLO", **where}
    addresses = {"inputs": [paths["input"]], "outputs": [paths["output"]]}
    answer = {"addresses": addresses, "parallel_config": {}}
    sockets["handshake"].send_multipart([b"\x01\x00", msgpack.encode(answer)])
    assert greeting() == {"status": "READY", **where}
    identity, ready = sockets["input"].recv_multipart()
    assert msgpack.decode(ready, type=EngineCoreReadyResponse).num_gpu_blocks == 200
    one_token = MsgpackEncoder().encode(make_engine_request("a", 5, max_tokens=1))
    shutdown = MsgpackEncoder().encode((0, -1, "request_shutdown", (9.0,)))
    sockets["input"].send_multipart([identity, b"\x00", *one_token])
    sockets["input"].send_multipart([identity, b"\x03", *shutdown])
    decoder, messages = MsgpackDecoder(EngineCoreOutputs), []
    while len(frames := sockets["output"].recv_multipart()) != 2:
        messages.append(decoder.decode(frames))
    assert frames == [EngineCoreProc.ENGINE_CORE_DEAD, b""]
    outputs = [output for message in messages for output in message.outputs]
    assert [output.new_token_ids for output in outputs] == [[8]]
    assert {message.engine_index for message in messages} == {1}
    # The shutdown's call is answered as well.
    assert [m.utility_output.call_id for m in messages if m.utility_output is not None] == [-1]
    thread.join(10)
    assert not thread.is_alive()


def test_llm_runs_its_engine_in_a_process_where_it_is_told_to(monkeypatch):
    from front_helpers import make_llm, piece_tokenizer, vllm_config

    config = vllm_config(parallel__enable_multiprocessing=True, parallel__worker_cls="auto")
    config.parallel_config.worker_cls = "vllmx.worker.null_runner.NullWorker"
    tokenizer = piece_tokenizer(*(chr(300 + i) for i in range(120)))
    with make_llm(monkeypatch, tokenizer, config) as llm:
        assert isinstance(llm.llm_engine.engine_core, SyncMPClient)
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        outputs = llm.generate([{"prompt_token_ids": [1] * n} for n in (3, 4)], params)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [[6, 7, 8, 9], [7, 8, 9, 10]]
        stopped = SamplingParams(max_tokens=9, stop=[chr(308)])
        (output,) = llm.generate([{"prompt_token_ids": [1] * 3}], stopped)
        assert output.outputs[0].text == chr(306) + chr(307)
        assert llm.llm_engine.reset_prefix_cache()
