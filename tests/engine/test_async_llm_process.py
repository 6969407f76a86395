# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM over an engine core in a process of its own, which is what it does by default."""

import asyncio
import multiprocessing
import os
import signal

import pytest
from front_helpers import make_async_llm, piece_tokenizer, vllm_config
from process_helpers import is_running, process_of, run

from vllmx.engine import front as front_module
from vllmx.engine.core_client import AsyncMPClient, AsyncThreadClient
from vllmx.exceptions import EngineDeadError, UserError
from vllmx.sampling_params import RequestOutputKind, SamplingParams

pytestmark = pytest.mark.timeout(120)
PIECES = [chr(300 + i) for i in range(120)]
DELTA = RequestOutputKind.DELTA


def build(monkeypatch, enable_multiprocessing=None, **overrides):
    config = vllm_config(
        parallel__enable_multiprocessing=enable_multiprocessing, max_model_len=1024, **overrides
    )
    return make_async_llm(monkeypatch, piece_tokenizer(*PIECES), config, disable_log_stats=True)


async def collect(engine, request_id="r", **params):
    params = SamplingParams(**{"max_tokens": 5, "ignore_eos": True, "output_kind": DELTA, **params})
    return [output async for output in engine.generate([0], params, request_id)]


def text_of(outputs):
    return "".join(completion.text for output in outputs for completion in output.outputs)


def test_streams_aborts_pauses_and_stops_as_in_one_process(monkeypatch):
    engine = build(monkeypatch, worker__delay=0.002)
    assert isinstance(engine.engine_core, AsyncMPClient)
    pid = process_of(engine.engine_core).pid

    async def main():
        results = await asyncio.gather(*(collect(engine, f"r{i}", max_tokens=9) for i in range(20)))
        assert {text_of(outputs) for outputs in results} == {"".join(PIECES[4:13])}
        assert text_of(await collect(engine, stop=[PIECES[7]], max_tokens=500)) == "".join(
            PIECES[4:7]
        )
        (last,) = await collect(engine, n=3, seed=1, output_kind=RequestOutputKind.FINAL_ONLY)
        assert [completion.text for completion in last.outputs] == ["".join(PIECES[4:9])] * 3
        for bad in ({"stop_token_ids": [-5], "min_tokens": 1}, {"logprobs": 9999}):
            with pytest.raises(ValueError):
                await collect(engine, **bad)
        # More minimum than there is room for.
        outputs = await collect(engine, max_tokens=None, min_tokens=4000)
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == 1023

        stream = engine.generate([0], SamplingParams(max_tokens=1000), "left")
        async for _ in stream:
            break
        await stream.aclose()
        assert await engine.reset_prefix_cache()  # no block is held any more

        await engine.pause_generation(mode="keep")
        assert await engine.is_paused()
        frozen = asyncio.create_task(collect(engine, "frozen"))
        await asyncio.sleep(0.05)
        assert not frozen.done()
        await engine.resume_generation()
        assert not await engine.is_paused()
        assert text_of(await frozen) == "".join(PIECES[4:9])
        waiting = asyncio.create_task(collect(engine, "waiting", max_tokens=20))
        await asyncio.sleep(0.01)
        await engine.pause_generation(wait_for_inflight_requests=True)
        assert len(text_of(await waiting)) == 20
        await engine.resume_generation()
        await engine.check_health()

        draining = asyncio.create_task(collect(engine, "draining", max_tokens=60))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.shutdown, 10.0)
        assert len(text_of(await draining)) == 60
        with pytest.raises(EngineDeadError, match="shut down"):
            await collect(engine)

    run(main())
    assert not is_running(pid)


def test_killed_engine_reaches_every_stream(monkeypatch):
    engine = build(monkeypatch, worker__delay=0.005)

    async def main():
        streams = [asyncio.create_task(collect(engine, f"r{i}", max_tokens=900)) for i in range(6)]
        await asyncio.sleep(0.1)
        os.kill(process_of(engine.engine_core).pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*streams, return_exceptions=True), 5)
        for result in results:
            assert isinstance(result, EngineDeadError) and "SIGKILL" in str(result)
        assert engine.errored and engine.is_stopped
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await collect(engine)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        await engine.abort("r0")

    run(main())
    engine.shutdown()


def test_tokenizer_that_cannot_be_read_leaves_no_process(monkeypatch):
    def refuse(config):
        raise UserError("tokenizer.json is not JSON.")

    monkeypatch.setattr(front_module, "get_tokenizer", refuse)
    from vllmx.engine.async_llm import AsyncLLM

    others = set(multiprocessing.active_children())  # servers of this worker's other tests
    with pytest.raises(UserError, match="not JSON"):
        AsyncLLM.from_vllm_config(vllm_config(parallel__enable_multiprocessing=True))
    assert set(multiprocessing.active_children()) <= others


def test_switch_keeps_the_engine_in_this_process(monkeypatch):
    engine = build(monkeypatch, enable_multiprocessing=False)
    assert isinstance(engine.engine_core, AsyncThreadClient)
    engine.shutdown()


def test_the_engines_process_is_told_the_markers_of_reasoning_as_tokens(monkeypatch):
    """It was started before the tokenizer was there, and the first budget was its end."""
    from vllmx.config import ReasoningConfig

    order = []
    start = AsyncMPClient._launch
    monkeypatch.setattr(front_module, "set_reasoning_markers", lambda *a: order.append("markers"))
    monkeypatch.setattr(AsyncMPClient, "_launch", lambda *a: order.append("process") or start(*a))
    for reasoning, want in (
        (ReasoningConfig("<think>", "</think>"), ["markers", "process"]),
        (None, ["process", "markers"]),
    ):
        order.clear()
        config = vllm_config(parallel__enable_multiprocessing=None, max_model_len=1024)
        config.reasoning_config = reasoning
        tokenizer = piece_tokenizer(*PIECES)
        make_async_llm(monkeypatch, tokenizer, config, disable_log_stats=True).shutdown()
        assert order == want
