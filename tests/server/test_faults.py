# SPDX-License-Identifier: Apache-2.0
"""Engine failures, dead engines, clients that leave, and the routes around the API."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

import httpx
import openai
import pytest
from server.helpers import (
    MODEL,
    EngineDouble,
    client,
    error_of,
    events,
    get,
    post,
    strict_json,
    wait_until,
)

from vllmx.entrypoints.openai.streams import StartedStream, merge_async_iterators
from vllmx.exceptions import EngineDeadError, EngineGenerateError

BODIES = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 6},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6},
}
EVERY_PATH = pytest.mark.parametrize("path", list(BODIES))
BOTH_WAYS = pytest.mark.parametrize("streamed", [False, True])


@EVERY_PATH
@BOTH_WAYS
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (EngineGenerateError("boom"), 500),
        (EngineDeadError(), 503),
        (RuntimeError("secret detail"), 500),
        (ValueError("bad value"), 400),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, Exception) else str(v),
)
def test_failure_before_the_first_output_has_its_own_status(
    engine: EngineDouble, url: str, path: str, streamed: bool, failure: Exception, status: int
) -> None:
    engine.fail_with = failure
    error = error_of(post(url, path, {**BODIES[path], "stream": streamed}), status)
    assert "secret" not in error["message"]
    engine.fail_with = None
    assert post(url, path, BODIES[path]).status_code == 200


@EVERY_PATH
def test_failure_inside_a_stream_is_an_event(engine: EngineDouble, url: str, path: str) -> None:
    engine.fail_after = (2, EngineGenerateError("boom"))
    response = post(url, path, {**BODIES[path], "stream": True})
    assert response.status_code == 200
    last = events(response)[-1]
    assert last["error"]["code"] == 500
    assert last["error"]["message"] == "boom"
    with pytest.raises(openai.APIError, match="boom"):
        list(client(url).completions.create(model=MODEL, prompt="a", stream=True))


@EVERY_PATH
def test_finish_reason_error_is_500(engine: EngineDouble, url: str, path: str) -> None:
    engine.finish_reason = "error"
    assert error_of(post(url, path, BODIES[path]), 500)["type"] == "InternalServerError"
    last = events(post(url, path, {**BODIES[path], "stream": True}))[-1]
    assert last["error"]["code"] == 500


@BOTH_WAYS
def test_abort_before_the_first_token_is_an_answer(
    engine: EngineDouble, url: str, streamed: bool
) -> None:
    engine.abort_at_once = True
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "stream": streamed}
    response = post(url, "/v1/completions", body)
    answer = events(response)[-1] if streamed else strict_json(response.text)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")
    assert choice["logprobs"]["token_logprobs"] == [None, None]


@EVERY_PATH
@BOTH_WAYS
def test_dead_engine_is_503_everywhere(
    engine: EngineDouble, url: str, path: str, streamed: bool
) -> None:
    engine.errored = True
    error_of(post(url, path, {**BODIES[path], "stream": streamed}), 503)
    error_of(get(url + "/health"), 503)
    error_of(get(url + "/ping"), 503)
    assert get(url + "/version").status_code == 200


@EVERY_PATH
@BOTH_WAYS
@pytest.mark.parametrize("n", [1, 2])
def test_client_that_leaves_aborts_its_requests(
    engine: EngineDouble, url: str, path: str, streamed: bool, n: int
) -> None:
    engine.delay = 0.05
    body = {**BODIES[path], "max_tokens": 100, "stream": streamed, "ignore_eos": True}
    num_requests = 1
    if "prompt" in body:
        body["prompt"], num_requests = ["ab"] * n, n
    with httpx.Client(timeout=20) as api, pytest.raises((httpx.ReadTimeout, StopIteration)):
        if streamed:
            with api.stream("POST", url + path, json=body) as response:
                next(response.iter_lines())
                raise StopIteration
        api.post(url + path, json=body, timeout=0.3)
    wait_until(lambda: len(engine.aborted) == num_requests and not engine.running)
    load = strict_json(get(url + "/load").text)
    assert load == {"server_load": 0}


def test_client_that_leaves_before_the_first_output_aborts_too(
    engine: EngineDouble, url: str
) -> None:
    engine.delay = 30.0
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            url + "/v1/completions", json={"prompt": ["a", "b"], "stream": True}, timeout=0.3
        )
    wait_until(lambda: len(engine.aborted) == 2 and not engine.running)


def test_requests_run_at_the_same_time(engine: EngineDouble, url: str) -> None:
    engine.delay = 0.05
    body = {"prompt": "a", "max_tokens": 10}

    async def run() -> float:
        async with httpx.AsyncClient(timeout=20) as api:
            start = time.monotonic()
            await asyncio.gather(*(api.post(url + "/v1/completions", json=body) for _ in range(8)))
            return time.monotonic() - start

    assert asyncio.run(run()) < 8 * 0.5 / 2


def test_routes_around_the_api(url: str) -> None:
    assert get(url + "/health").text == ""
    assert httpx.post(url + "/ping").status_code == 200
    assert set(get(url + "/version").json()) == {"version"}
    assert get(url + "/metrics").headers["content-type"].startswith("text/plain")
    assert get(url + "/openapi.json").status_code == 200
    cards = client(url).models.list().data
    assert [(card.id, card.max_model_len) for card in cards] == [(MODEL, 128)]
    assert client(url).models.retrieve(MODEL).id == MODEL
    preflight = httpx.options(
        url + "/v1/models",
        headers={"Origin": "http://x", "Access-Control-Request-Method": "GET"},
    )
    assert preflight.headers["access-control-allow-origin"] == "*"


def test_merged_streams_end_together_when_one_fails() -> None:
    closed: list[int] = []

    async def count(index: int, fail: bool) -> AsyncGenerator[int, None]:
        try:
            for i in range(1000):
                if fail and i == 3:
                    raise ValueError("three")
                yield i
                await asyncio.sleep(0.001)
        finally:
            closed.append(index)

    async def run() -> None:
        seen = []
        with pytest.raises(ValueError, match="three"):
            async for item in merge_async_iterators(count(0, False), count(1, True)):
                seen.append(item)
        assert {index for index, _ in seen} == {0, 1}
        await asyncio.sleep(0.01)
        assert sorted(closed) == [0, 1]

    asyncio.run(run())


@pytest.mark.parametrize("count", [1, 3])
def test_merged_streams_are_closed_with_the_merged_one(count: int) -> None:
    closed: list[int] = []

    async def numbers(index: int) -> AsyncGenerator[int, None]:
        try:
            while True:
                yield index
                await asyncio.sleep(0)
        finally:
            closed.append(index)

    async def run() -> None:
        merged = merge_async_iterators(*map(numbers, range(count)))
        seen = {(await anext(merged))[0] for _ in range(10)}
        assert seen == set(range(count))
        await merged.aclose()
        assert sorted(closed) == list(range(count))

    asyncio.run(run())


@EVERY_PATH
def test_requests_of_equal_id_are_told_apart(engine: EngineDouble, url: str, path: str) -> None:
    engine.delay = 0.05
    headers = {"X-Request-Id": "same"}
    body = {**BODIES[path], "request_id": "same", "ignore_eos": True}

    async def run() -> list[str]:
        async with httpx.AsyncClient(timeout=20, headers=headers) as api:
            long = asyncio.create_task(api.post(url + path, json={**body, "max_tokens": 40}))
            short = asyncio.create_task(api.post(url + path, json={**body, "max_tokens": 20}))
            while (await api.get(url + "/load")).json() != {"server_load": 2}:
                assert not short.done()
                await asyncio.sleep(0.02)
            ids = [(await short).json()["id"]]
            # Drain and /load still know of the other one.
            assert (await api.get(url + "/load")).json() == {"server_load": 1}
            return [*ids, (await long).json()["id"]]

    first, second = asyncio.run(run())
    assert first == second and first.endswith("-same")  # the client's own id comes back
    assert len({request_id for _, _, request_id in engine.seen}) == 2
    assert strict_json(get(url + "/load").text) == {"server_load": 0}


def test_started_stream_that_is_never_read_still_closes() -> None:
    closed = []

    async def numbers() -> AsyncGenerator[int, None]:
        try:
            yield 1
            yield 2
        finally:
            closed.append(True)

    async def run() -> list[int]:
        unread = await StartedStream.start(numbers())
        await unread.aclose()
        assert closed == [True]
        return [item async for item in await StartedStream.start(numbers())]

    assert asyncio.run(run()) == [1, 2]
