# SPDX-License-Identifier: Apache-2.0
"""The server over the real engine with a worker that says the alphabet."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.helpers import (
    MODEL,
    client,
    error_of,
    events,
    get,
    ids,
    post,
    served,
    strict_json,
    wait_until,
)

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def metric(url: str, name: str, **labels: str) -> float:
    """Value of one sample of /metrics."""
    labels = {"engine": "0", "model_name": MODEL, **labels}
    text = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
    found = re.search(rf"^{re.escape(f'{name}{{{text}}}')} (.*)$", get(url + "/metrics").text, re.M)
    assert found, f"no {name}{{{text}}} in /metrics"
    return float(found[1])


@pytest.fixture
def url(letters_url: str) -> str:
    """The server that most tests here ask."""
    return letters_url


def test_model_given_by_a_relative_path_is_served_under_it(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder.parent)
    name = f"./{model_folder.name}"
    for url in served(name, "LetterWorker", name=None):
        assert [card["id"] for card in get(url + "/v1/models").json()["data"]] == [name]
        answer = post(url, COMPLETIONS, {"model": name, "prompt": "ab", "max_tokens": 2})
        assert answer.status_code == 200 and answer.json()["model"] == name
        error_of(post(url, COMPLETIONS, {"model": str(model_folder), "prompt": "ab"}), 404)


def test_letters_are_where_the_workers_think(model_folder: Path) -> None:
    assert ids("az") == [64, 89]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [65], "bad_words": ["b"]},
        {"allowed_token_ids": [257], "min_tokens": 3},
        {"allowed_token_ids": [65], "min_tokens": 1, "stop_token_ids": [65], "logit_bias": {65: 9}},
    ],
    ids=str,
)
def test_rules_that_leave_no_token_are_400(
    url: str, path: str, streamed: bool, fields: dict[str, Any]
) -> None:
    prompt = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": [{"role": "user", "content": "a"}]}}
    error = error_of(post(url, path, {**prompt[path], **fields, "stream": streamed}), 400)
    assert "leave no token" in error["message"] and error["param"] == "allowed_token_ids"
    assert post(url, path, {**prompt[path], "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("start", range(0, 26, 5))
@pytest.mark.parametrize("include", [False, True])
def test_stream_equals_plain_answer_whatever_the_stop(url: str, start: int, include: bool) -> None:
    free = client(url).completions.create(model=MODEL, prompt="ab", max_tokens=40).choices[0].text
    stop = free[start : start + 4]
    fields: dict[str, Any] = {
        "prompt": "ab",
        "max_tokens": 40,
        "stop": [stop],
        "include_stop_str_in_output": include,
        "stream_options": {"include_usage": True},
    }
    chunks = events(post(url, COMPLETIONS, {**fields, "stream": True}))
    del fields["stream_options"]
    plain = strict_json(post(url, COMPLETIONS, fields).text)
    streamed = [chunk["choices"][0] for chunk in chunks[:-1]]
    expected = free[: free.find(stop)] + (stop if include else "")
    assert plain["choices"][0]["text"] == expected
    assert "".join(choice["text"] for choice in streamed) == expected
    assert streamed[-1]["finish_reason"] == plain["choices"][0]["finish_reason"] == "stop"
    assert streamed[-1]["stop_reason"] == plain["choices"][0]["stop_reason"] == stop
    usage = plain["usage"]
    assert {k: v for k, v in usage.items() if v is not None} == chunks[-1]["usage"]


def test_held_back_text_is_sent_when_the_stop_does_not_come(url: str) -> None:
    for path, body in (
        (COMPLETIONS, {"prompt": "ab"}),
        (CHAT, {"messages": [{"role": "user", "content": "ab"}]}),
    ):
        fields = {**body, "max_tokens": 20}
        free = strict_json(post(url, path, fields).text)["choices"][0]
        stopped = {**fields, "stop": ["Z" * 12], "stream": True}
        choices = [chunk["choices"][0] for chunk in events(post(url, path, stopped))]
        if path == CHAT:
            text = "".join(choice["delta"].get("content", "") for choice in choices)
            assert text == free["message"]["content"]
        else:
            assert "".join(choice["text"] for choice in choices) == free["text"]
        assert choices[-1]["finish_reason"] == "length"


def test_chat_and_completion_say_the_same_for_the_same_prompt(url: str) -> None:
    message = {"role": "user", "content": "ab"}
    chat = strict_json(
        post(url, CHAT, {"messages": [message], "max_tokens": 9, "return_token_ids": True}).text
    )
    plain = strict_json(
        post(url, COMPLETIONS, {"prompt": chat["prompt_token_ids"], "max_tokens": 9}).text
    )
    assert plain["choices"][0]["text"] == chat["choices"][0]["message"]["content"]


@pytest.mark.parametrize("streamed", [False, True])
def test_n_samples_are_complete_and_numbered(url: str, streamed: bool) -> None:
    body = {"prompt": ["ab", "abc"], "n": 3, "max_tokens": 7, "temperature": 1.0, "seed": 5}
    if streamed:
        chunks = events(post(url, COMPLETIONS, {**body, "stream": True}))
        texts = dict.fromkeys(range(6), "")
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["text"]
    else:
        choices = strict_json(post(url, COMPLETIONS, body).text)["choices"]
        texts = {choice["index"]: choice["text"] for choice in choices}
    assert texts == {
        0: "cdefghi",
        1: "cdefghi",
        2: "cdefghi",
        3: "defghij",
        4: "defghij",
        5: "defghij",
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [260]},
        {"prompt": [-1]},
        {"prompt": ""},
        {"prompt": "x" * 200},
        {"prompt": "x" * 100_000},
        {"logit_bias": {"260": 1}},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"abc": 1}},
        {"stop_token_ids": [999999], "min_tokens": 1},
        {"stop_token_ids": [-5], "min_tokens": 1},
        {"allowed_token_ids": [999999]},
        {"allowed_token_ids": [-1]},
        {"allowed_token_ids": []},
        {"logprobs": 21},
        {"prompt_logprobs": 21},
        {"n": 0},
        {"n": 2, "temperature": 0},
        {"n": 10**6, "temperature": 1},
        {"temperature": -1},
        {"min_tokens": 9, "max_tokens": 5},
        {"max_tokens": 0},
        {"max_tokens": 129},
        {"bad_words": [""]},
        {"cache_salt": ""},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_engine_lives_on_after_a_bad_request(url: str, fields: dict[str, Any]) -> None:
    for streamed in (False, True):
        body = {"prompt": "ab", **fields, "stream": streamed}
        error = error_of(post(url, COMPLETIONS, body), 400)
        assert "\n" not in error["message"]
    assert get(url + "/health").status_code == 200
    good = strict_json(post(url, COMPLETIONS, {"prompt": "ab", "max_tokens": 3}).text)
    assert good["choices"][0]["text"] == "cde"


def test_bad_prompt_among_good_ones_takes_them_along(url: str) -> None:
    for streamed in (False, True):
        body = {"prompt": [[70], [99999], [71]], "stream": streamed}
        error_of(post(url, COMPLETIONS, body), 400)
    wait_until(lambda: metric(url, "vllm:num_requests_running") == 0)


def test_concurrent_requests_share_steps(slow_url: str) -> None:
    before = metric(slow_url, "vllm:iteration_tokens_total_count")

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=30) as api:
            bodies = [{"prompt": f"a{i}", "max_tokens": 20} for i in range(8)]
            return await asyncio.gather(
                *(api.post(slow_url + COMPLETIONS, json=body) for body in bodies)
            )

    responses = asyncio.run(run())
    assert {response.status_code for response in responses} == {200}
    steps = metric(slow_url, "vllm:iteration_tokens_total_count") - before
    assert 20 <= steps < 60, "eight requests one after the other would take 160 steps"


@pytest.mark.parametrize("streamed", [False, True])
def test_gauges_go_to_zero_after_all_clients_left(slow_url: str, streamed: bool) -> None:
    body = {"prompt": "ab", "max_tokens": 100, "stream": streamed, "ignore_eos": True}

    async def leave(api: httpx.AsyncClient) -> None:
        if streamed:
            async with api.stream("POST", slow_url + COMPLETIONS, json=body) as response:
                async for _ in response.aiter_lines():
                    await asyncio.sleep(0.1)
                    return
        else:
            with pytest.raises(httpx.ReadTimeout):
                await api.post(slow_url + COMPLETIONS, json=body, timeout=0.4)

    async def run() -> None:
        async with httpx.AsyncClient(timeout=20) as api:
            await asyncio.gather(*(leave(api) for _ in range(20)))

    asyncio.run(run())
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    wait_until(lambda: all(metric(slow_url, f"vllm:{name}") == 0 for name in names), 3.0)
    assert strict_json(get(slow_url + "/load").text) == {"server_load": 0}
    assert post(slow_url, COMPLETIONS, {"prompt": "ab", "max_tokens": 1}).status_code == 200


def test_metrics_count_what_was_served(url: str) -> None:
    counters = {
        "vllm:prompt_tokens_total": 6.0,
        "vllm:generation_tokens_total": 10.0,
        "vllm:e2e_request_latency_seconds_count": 2.0,
        "vllm:time_to_first_token_seconds_count": 2.0,
        "vllm:inter_token_latency_seconds_count": 8.0,
        "vllm:request_prompt_tokens_sum": 6.0,
        "vllm:request_generation_tokens_sum": 10.0,
        "vllm:request_params_max_tokens_sum": 10.0,
        "vllm:request_params_n_count": 2.0,
        "vllm:prefix_cache_queries_total": 6.0,
    }
    before = {name: metric(url, name) for name in counters}
    success = metric(url, "vllm:request_success_total", finished_reason="length")
    response = post(url, COMPLETIONS, {"prompt": ["foo", "bar"], "max_tokens": 5})
    assert response.status_code == 200
    for name, added in counters.items():
        assert metric(url, name) - before[name] == added, name
    after = metric(url, "vllm:request_success_total", finished_reason="length")
    assert after - success == 2


def test_fault_in_the_engine_is_503_from_then_on(model_folder: Path) -> None:
    for url in served(model_folder, "FaultyWorker"):
        response = post(url, COMPLETIONS, {"prompt": "ab", "max_tokens": 20, "stream": True})
        last = events(response)[-1]
        assert last["error"]["code"] == 503
        error_of(post(url, COMPLETIONS, {"prompt": "ab"}), 503)
        error_of(get(url + "/health"), 503)
