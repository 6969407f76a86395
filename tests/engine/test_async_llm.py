# SPDX-License-Identifier: Apache-2.0
"""AsyncLLM over a worker without a model: streams, aborts, a dead engine, shutdown."""

import asyncio
import random

import pytest
from front_helpers import make_async_llm, piece_tokenizer, vllm_config

from vllmx.exceptions import EngineDeadError, EngineGenerateError
from vllmx.sampling_params import RequestOutputKind, SamplingParams

LETTERS = [chr(ord("a") + i) for i in range(26)]
DELTA = RequestOutputKind.DELTA


def alphabet(req_id: str, position: int) -> int:
    """a, b, c, ... after a prompt of one token."""
    return (position - 1) % 26


@pytest.fixture
def build(monkeypatch):
    """build(**config): an AsyncLLM that says the alphabet; all are shut down at the end."""
    engines = []

    def make(**overrides):
        log_stats = overrides.pop("log_stats", False)
        config = vllm_config(script=alphabet, **{"max_model_len": 1024, **overrides})
        engine = make_async_llm(
            monkeypatch, piece_tokenizer(*LETTERS), config, disable_log_stats=not log_stats
        )
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def collect(engine, request_id="r", prompt=(0,), **params):
    params = SamplingParams(**{"max_tokens": 5, **params})
    return [output async for output in engine.generate(list(prompt), params, request_id)]


async def idle(engine):
    """Wait until the engine core has nothing left to do."""
    for _ in range(500):
        if not engine.engine_core.engine_core.scheduler.has_unfinished_requests():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the engine core still has requests")


def text_of(outputs, index=0):
    return "".join(c.text for o in outputs for c in o.outputs if c.index == index)


def test_every_kind_of_output_tells_the_same(build):
    engine = build()

    async def main():
        delta = await collect(engine, output_kind=DELTA)
        cumulative = await collect(engine, output_kind=RequestOutputKind.CUMULATIVE)
        final = await collect(engine, output_kind=RequestOutputKind.FINAL_ONLY)
        assert text_of(delta) == cumulative[-1].outputs[0].text == final[0].outputs[0].text
        assert text_of(delta) == "abcde"
        assert len(final) == 1
        for outputs in (delta, cumulative, final):
            assert [output.finished for output in outputs[:-1]] == [False] * (len(outputs) - 1)
            assert outputs[-1].finished
            assert outputs[-1].request_id == "r"

    run(main())


def test_many_requests_at_once_have_their_own_answers(build):
    engine = build(scheduler__max_num_seqs=8)

    async def main():
        results = await asyncio.gather(
            *(collect(engine, f"r{i}", max_tokens=1 + i % 30, output_kind=DELTA) for i in range(60))
        )
        for i, outputs in enumerate(results):
            assert {output.request_id for output in outputs} == {f"r{i}"}
            assert text_of(outputs) == "".join(LETTERS * 2)[: 1 + i % 30]

    run(main())


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_n_answers_all_arrive_though_the_consumer_is_slow(build, kind):
    engine = build()

    async def main():
        seen = {}
        params = SamplingParams(n=3, max_tokens=6, output_kind=kind, seed=4)
        async for output in engine.generate([0], params, "r"):
            for completion in output.outputs:
                joined = seen.get(completion.index, "") if kind == DELTA else ""
                seen[completion.index] = joined + completion.text
            await asyncio.sleep(0.01)
        assert seen == {0: "abcdef", 1: "abcdef", 2: "abcdef"}

    run(main())


def test_stop_string_ends_the_request_in_the_engine_too(build):
    engine = build()

    async def main():
        outputs = await collect(engine, stop=["cd"], max_tokens=1000, output_kind=DELTA)
        assert text_of(outputs) == "ab"
        assert outputs[-1].outputs[0].stop_reason == "cd"
        await idle(engine)

    run(main())


def test_bad_request_is_a_value_error_and_the_engine_goes_on(build):
    engine = build()

    async def main():
        for prompt in ([-1], [], [999999], [0] * 5000):
            with pytest.raises(ValueError):
                await collect(engine, prompt=prompt)
        with pytest.raises(ValueError, match="stop_token_ids"):
            await collect(engine, stop_token_ids=[-5], min_tokens=1)
        assert text_of(await collect(engine, output_kind=DELTA)) == "abcde"
        await engine.check_health()

    run(main())


# ------------------------------------------------------------------ aborts


@pytest.mark.parametrize("n", [1, 3])
def test_consumer_that_breaks_off_aborts_its_request(build, n):
    engine = build(worker__delay=0.001)

    async def main():
        params = SamplingParams(max_tokens=1000, output_kind=DELTA, n=n)
        stream = engine.generate([0], params, "r")
        async for _ in stream:
            break
        await stream.aclose()
        assert not engine.output_processor.has_unfinished_requests()
        assert not engine.output_processor.parent_requests
        await idle(engine)

    run(main())


def test_cancelled_consumer_aborts_its_request(build):
    engine = build(worker__delay=0.001)

    async def main():
        for kind in RequestOutputKind:
            task = asyncio.create_task(
                collect(engine, max_tokens=1000, ignore_eos=True, output_kind=kind)
            )
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not engine.output_processor.has_unfinished_requests()
        await idle(engine)
        assert text_of(await collect(engine, output_kind=DELTA)) == "abcde"

    run(main())


def test_abort_by_id_gives_a_last_output(build):
    engine = build(worker__delay=0.001)

    async def main():
        for ids in ("r", ["r"], ["unknown", "r", "r"]):
            task = asyncio.create_task(collect(engine, max_tokens=1000, output_kind=DELTA))
            await asyncio.sleep(0.03)
            await engine.abort(ids)
            outputs = await task
            assert outputs[-1].finished
            assert outputs[-1].outputs[0].finish_reason == "abort"
        await engine.abort("r")
        await engine.abort("never seen")
        await idle(engine)

    run(main())


def test_aborts_in_any_order_lose_nothing_and_end_everything(build):
    engine = build(scheduler__max_num_seqs=4)
    rng = random.Random(5)

    async def client(i):
        how = rng.choice(["whole", "break", "cancel", "abort", "late"])
        task = asyncio.create_task(collect(engine, f"r{i}", max_tokens=30, output_kind=DELTA))
        await asyncio.sleep(rng.random() * 0.02)
        if how == "cancel":
            task.cancel()
        if how == "abort":
            await engine.abort(f"r{i}")
        outputs = (await asyncio.gather(task, return_exceptions=True))[0]
        if how == "late":
            await engine.abort(f"r{i}")
        if how in ("whole", "late"):
            assert text_of(outputs) == "".join(LETTERS * 2)[:30]

    async def main():
        await asyncio.gather(*(client(i) for i in range(50)))
        assert not engine.output_processor.has_unfinished_requests()
        await idle(engine)
        assert text_of(await collect(engine, output_kind=DELTA)) == "abcde"

    run(main())


def test_same_id_twice_is_two_requests(build):
    engine = build()

    async def main():
        results = await asyncio.gather(*(collect(engine, "same", output_kind=DELTA) for _ in "ab"))
        assert [text_of(outputs) for outputs in results] == ["abcde", "abcde"]

    run(main())


# ------------------------------------------------------------------ death and shutdown


def test_dead_engine_reaches_everybody_who_waits_and_who_comes(build):
    engine = build(worker__fail_at_step=10)

    async def main():
        tasks = [asyncio.create_task(collect(engine, f"r{i}", max_tokens=500)) for i in range(5)]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(result) for result in results} == {EngineDeadError}
        assert "scripted failure" in str(results[0])
        assert engine.errored
        assert engine.is_stopped
        with pytest.raises(EngineDeadError, match="scripted failure"):
            await collect(engine)
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        assert isinstance(engine.dead_error, EngineDeadError)
        await engine.abort("r0")  # no error

    run(main())


def test_fault_with_one_request_spares_the_others(build):
    engine = build(worker__delay=0.001)

    async def main():
        bad = asyncio.create_task(collect(engine, "bad", max_tokens=500))
        good = asyncio.create_task(collect(engine, "good", max_tokens=100, output_kind=DELTA))
        await asyncio.sleep(0.02)
        (internal,) = engine.output_processor.external_req_ids["bad"]
        engine.output_processor.request_states[internal].detokenizer = None
        with pytest.raises(EngineGenerateError, match="bad failed"):
            await bad
        assert len(text_of(await good)) == 100
        await idle(engine)

    run(main())


def test_broken_output_handler_is_a_dead_engine_not_a_hang(build, monkeypatch):
    engine = build()

    def explode(*args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(engine.output_processor, "process_outputs", explode)

    async def main():
        with pytest.raises(EngineDeadError, match="broken"):
            await collect(engine)
        assert engine.errored
        with pytest.raises(EngineDeadError):
            await collect(engine)

    run(main())


def test_shutdown_from_another_thread_ends_waiting_requests(build):
    engine = build(worker__delay=0.001)

    async def main():
        tasks = [
            asyncio.create_task(collect(engine, f"r{i}", max_tokens=900, output_kind=DELTA))
            for i in range(3)
        ]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(engine.shutdown)
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                assert isinstance(result, EngineDeadError)
            else:
                assert result[-1].outputs[0].finish_reason == "abort"
        with pytest.raises(EngineDeadError):
            await collect(engine)

    run(main())


def test_shutdown_inside_the_loop_and_twice(build):
    engine = build()

    async def main():
        await collect(engine)
        engine.shutdown()
        engine.shutdown()
        assert engine.errored
        await asyncio.sleep(0.05)
        assert engine.output_handler.done()

    run(main())
    engine.shutdown()
    assert not engine.engine_core._thread.is_alive()


def test_shutdown_with_time_lets_requests_finish(build):
    engine = build(worker__delay=0.001)

    async def main():
        task = asyncio.create_task(collect(engine, max_tokens=50, output_kind=DELTA))
        await asyncio.sleep(0.02)
        await asyncio.to_thread(engine.shutdown, 10.0)
        assert len(text_of(await task)) == 50

    run(main())


def test_engine_that_was_never_used_can_be_shut_down(build):
    engine = build()
    assert engine.is_running
    assert not engine.errored
    engine.shutdown()
    assert engine.errored


# ------------------------------------------------------------------ the rest


def test_prefix_cache_can_be_reset(build):
    engine = build()

    async def main():
        prompt = [0] * 40
        await collect(engine, prompt=prompt)
        cached = (await collect(engine, prompt=prompt))[-1].num_cached_tokens
        assert cached == 32
        assert await engine.reset_prefix_cache()
        assert (await collect(engine, prompt=prompt))[-1].num_cached_tokens == 0

    run(main())


def test_statistics_reach_the_loggers(build):
    engine = build(log_stats=True)
    records = []

    async def main():
        record = engine.logger_manager.record
        engine.logger_manager.record = lambda *args: (records.append(args), record(*args))
        outputs = await collect(engine, max_tokens=4)
        assert outputs[-1].metrics.num_generation_tokens == 4
        await asyncio.sleep(0.05)
        await engine.do_log_stats()

    run(main())
    iterations = [iteration for _, iteration in records if iteration is not None]
    assert sum(iteration.num_generation_tokens for iteration in iterations) == 4
    assert sum(len(iteration.finished_requests) for iteration in iterations) == 1


def test_prompt_text_and_tokenizer_are_at_hand(build):
    engine = build()

    async def main():
        params = SamplingParams(max_tokens=1)
        prompt = {"prompt_token_ids": [0], "prompt": "a"}
        outputs = [output async for output in engine.generate(prompt, params, "r")]
        assert outputs[-1].prompt == "a"

    run(main())
    assert engine.get_tokenizer() is engine.tokenizer is not None
