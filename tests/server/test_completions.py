# SPDX-License-Identifier: Apache-2.0
"""/v1/completions over a scripted engine: prompts, choices, echo, logprobs, usage, streams."""

from __future__ import annotations

from typing import Any

import pytest
from server.helpers import (
    MODEL,
    EngineDouble,
    client,
    error_of,
    events,
    ids,
    post,
    strict_json,
)

from vllmx.sampling_params import RepetitionDetectionParams

PATH = "/v1/completions"


def complete(url: str, **body: Any) -> dict[str, Any]:
    """The body of a completion that must succeed."""
    response = post(url, PATH, {"prompt": "ab", "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def stream(url: str, **body: Any) -> list[Any]:
    """The events of a streamed completion that must succeed."""
    response = post(url, PATH, {"prompt": "ab", "max_tokens": 4, "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response)


def test_openai_client_reads_plain_and_streamed_answers(url: str) -> None:
    api = client(url)
    plain = api.completions.create(model=MODEL, prompt="ab", max_tokens=5)
    assert plain.choices[0].text == "Hello"
    assert plain.choices[0].finish_reason == "length"
    assert plain.usage.total_tokens == 7
    chunks = list(api.completions.create(model=MODEL, prompt="ab", max_tokens=5, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert {chunk.id for chunk in chunks} == {chunks[0].id}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [ids("ab")]),
        (["ab", "c"], [ids("ab"), ids("c")]),
        ([5, 6], [[5, 6]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
    ids=["text", "texts", "ids", "lists-of-ids"],
)
def test_every_kind_of_prompt_reaches_the_engine_in_order(
    engine: EngineDouble, url: str, prompt: Any, expected: list[list[int]]
) -> None:
    body = complete(url, prompt=prompt)
    assert [seen[0]["prompt_token_ids"] for seen in engine.seen] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


@pytest.mark.parametrize("streamed", [False, True])
def test_choice_index_is_prompt_times_n_plus_sample(url: str, streamed: bool) -> None:
    fields = {"prompt": ["ab", "c"], "n": 3, "temperature": 1.0}
    if not streamed:
        body = complete(url, **fields)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3, 4, 5]
        assert body["usage"] == {
            "prompt_tokens": 3,
            "completion_tokens": 24,
            "total_tokens": 27,
            "prompt_tokens_details": None,
        }
        return
    chunks = stream(url, **fields, stream_options={"include_usage": True})
    texts = dict.fromkeys(range(6), "")
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert set(texts.values()) == {"Hell"}
    assert chunks[-1]["usage"]["completion_tokens"] == 24
    assert chunks[-1]["usage"]["prompt_tokens"] == 3


def test_every_field_of_the_sampler_arrives(engine: EngineDouble, url: str) -> None:
    fields = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
        "stop": ["x", "yy"],
        "stop_token_ids": [3],
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "allowed_token_ids": [1, 2],
        "bad_words": ["bad"],
        "logprobs": 2,
    }
    complete(url, **fields, logit_bias={"5": 1000, "6": -3})
    params = engine.seen[0][1]
    for name, value in fields.items():
        assert getattr(params, name) == value, name
    assert params.logit_bias == {5: 100.0, 6: -3.0}
    assert params.max_tokens == 4


def test_max_tokens_is_16_within_what_fits_unless_given(engine: EngineDouble, url: str) -> None:
    complete(url, max_tokens=None)
    complete(url, prompt="x" * 120, max_tokens=None)
    complete(url, max_tokens=126)
    assert [seen[1].max_tokens for seen in engine.seen] == [16, 8, 126]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_puts_the_prompt_first_with_offsets_in_characters(
    url: str, streamed: bool, as_ids: bool
) -> None:
    prompt = "\n2. Ann é" if not as_ids else ids("\n2. Ann é")
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 3}
    if streamed:
        choices = [chunk["choices"][0] for chunk in stream(url, **fields)]
    else:
        choices = complete(url, **fields)["choices"]
    text = "".join(choice["text"] for choice in choices)
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in choice["logprobs"].items():
            columns.setdefault(name, []).extend(values)
    assert text == "\n2. Ann éHel"
    num_prompt = len(ids("\n2. Ann é"))
    assert len(columns["tokens"]) == num_prompt + 3
    assert columns["token_logprobs"][0] is None
    assert all(value == -0.5 for value in columns["token_logprobs"][1:])
    offset = 0
    for token, start in zip(columns["tokens"], columns["text_offset"], strict=True):
        assert start == offset
        offset += len(token)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("prompt", ["Reply: No", ids("Reply: No"), ["Reply: No", "Ok"]])
def test_echo_with_zero_max_tokens_returns_the_prompt_alone(
    url: str, prompt: Any, logprobs: int | None, streamed: bool
) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 0}
    if streamed:
        chunks = stream(url, **fields, stream_options={"include_usage": True})
        usage = chunks.pop()["usage"]
        choices = [chunk["choices"][0] for chunk in chunks]
        assert all(c["finish_reason"] in (None, "length") for c in choices)
    else:
        body = complete(url, **fields)
        usage, choices = body["usage"], body["choices"]
    texts = {choice["index"]: choice["text"] for choice in choices if choice["text"]}
    assert texts == (
        {0: "Reply: No", 1: "Ok"} if prompt == ["Reply: No", "Ok"] else {0: "Reply: No"}
    )
    assert usage["completion_tokens"] == 0
    if logprobs is not None:
        found = next(c["logprobs"] for c in choices if c["index"] == 0 and c["logprobs"])
        assert len(found["tokens"]) == len("Reply: No")
        assert found["token_logprobs"][0] is None
        assert None not in found["token_logprobs"][1:]


def test_zero_max_tokens_without_echo_is_refused(url: str) -> None:
    error = error_of(post(url, PATH, {"prompt": "a", "max_tokens": 0}), 400)
    assert "max_tokens" in error["message"]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_infinite_logprobs_become_minus_9999(
    engine: EngineDouble, url: str, value: float, streamed: bool
) -> None:
    engine.logprob = value
    fields = {"logprobs": 2, "echo": True, "prompt_logprobs": None if streamed else 1}
    choices = (
        [chunk["choices"][0] for chunk in stream(url, **fields)]
        if streamed
        else complete(url, **fields)["choices"]
    )
    numbers = [v for c in choices for v in c["logprobs"]["token_logprobs"][1:]]
    assert set(numbers) == {-9999.0}
    if not streamed:
        assert choices[0]["prompt_logprobs"][0] is None
        shown = choices[0]["prompt_logprobs"][1][str(ids("b")[0])]
        assert shown == {"logprob": -9999.0, "rank": 1, "decoded_token": "b"}


def test_top_logprobs_hold_the_sampled_token_and_as_many_as_asked(url: str) -> None:
    for count, size in ((0, 1), (1, 2)):
        found = complete(url, logprobs=count)["choices"][0]["logprobs"]
        assert found["tokens"] == ["H", "e", "l", "l"]
        assert [len(position) for position in found["top_logprobs"]] == [size] * 4


def test_tokens_can_be_shown_as_ids(url: str) -> None:
    found = complete(url, logprobs=0, return_tokens_as_token_ids=True, return_token_ids=True)
    choice = found["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in ids("Hell")]
    assert choice["token_ids"] == ids("Hell")
    assert choice["prompt_token_ids"] == ids("ab")


def test_stream_says_the_same_as_the_plain_answer(url: str) -> None:
    fields = {"max_tokens": 12, "logprobs": 1, "return_token_ids": True}
    plain = complete(url, **fields)["choices"][0]
    choices = [chunk["choices"][0] for chunk in stream(url, **fields)]
    assert [i for c in choices for i in c["token_ids"]] == plain["token_ids"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [value for c in choices for value in c["logprobs"][name]]
        assert joined == plain["logprobs"][name], name
    assert choices[0]["prompt_token_ids"] == plain["prompt_token_ids"]


def test_every_chunk_has_finish_reason_and_only_the_last_a_word(url: str) -> None:
    chunks = stream(url)
    assert all(
        set(c["choices"][0]) >= {"index", "text", "logprobs", "finish_reason"} for c in chunks
    )
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None, None, None, "length"]


@pytest.mark.parametrize(
    ("options", "at_end", "in_chunks"),
    [
        ("absent", False, False),
        (None, False, False),
        ({}, False, False),
        ({"include_usage": False}, False, False),
        ({"include_usage": False, "continuous_usage_stats": True}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
    ids=str,
)
def test_usage_is_streamed_only_as_asked(
    url: str, options: Any, at_end: bool, in_chunks: bool
) -> None:
    chunks = stream(url, **({} if options == "absent" else {"stream_options": options}))
    if at_end:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    assert all(chunk["choices"] for chunk in chunks)
    assert [bool(chunk.get("usage")) for chunk in chunks] == [in_chunks] * len(chunks)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}])
def test_stream_options_without_stream_are_refused(url: str, options: dict[str, Any]) -> None:
    error = error_of(post(url, PATH, {"prompt": "a", "stream_options": options}), 400)
    assert error["param"] == "stream_options"


@pytest.mark.parametrize(
    ("limit", "side", "kept"),
    [(3, None, "def"), (3, "right", "abc"), (3, "left", "def"), (-1, None, "abcdef")],
)
def test_prompt_is_truncated_on_the_side_asked_for(
    engine: EngineDouble, url: str, limit: int, side: str | None, kept: str
) -> None:
    body = complete(
        url, prompt="abcdef", truncate_prompt_tokens=limit, truncation_side=side, echo=True
    )
    assert engine.seen[0][0]["prompt_token_ids"] == ids(kept)
    assert body["choices"][0]["text"] == kept + "Hell"


def test_request_id_comes_from_header_then_body(url: str) -> None:
    given = post(url, PATH, {"prompt": "a", "request_id": "mine"}, headers={"x-request-id": "h"})
    assert strict_json(given.text)["id"] == "cmpl-h"
    assert complete(url, request_id="mine")["id"] == "cmpl-mine"
    assert complete(url)["id"] != complete(url)["id"]


def test_sampling_defaults_of_the_model_fill_what_the_request_leaves_open(
    engine: EngineDouble, url: str, model_folder: Any
) -> None:
    from server.helpers import running_server

    from vllmx.config import ServerConfig
    from vllmx.entrypoints.openai.api_server import build_app

    other = EngineDouble(model_folder)
    other.vllm_config.model_config.generation_config_dict = {
        "temperature": 0.3,
        "top_k": 7,
        "repetition_penalty": 1.1,
        "max_new_tokens": 5,
        "eos_token_id": 257,
    }
    app = build_app(other, other.vllm_config, ServerConfig())
    with running_server(app) as other_url:
        post(other_url, PATH, {"prompt": "a"})
        post(other_url, PATH, {"prompt": "a", "temperature": 0, "max_tokens": 9})
        post(other_url, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]})
    first, second, third = (seen[1] for seen in other.seen)
    assert (first.temperature, first.top_k, first.repetition_penalty) == (0.3, 7, 1.1)
    assert first.max_tokens == third.max_tokens == 5
    assert (second.temperature, second.repetition_penalty, second.max_tokens) == (0.0, 1.1, 9)


def test_budgets_and_the_end_of_repetitions_reach_the_engine(
    engine: EngineDouble, url: str
) -> None:
    detection = {"max_pattern_size": 4, "min_count": 3}
    body = {"prompt": "a", "thinking_token_budget": 7, "repetition_detection": detection}
    assert post(url, PATH, body).status_code == 200
    (_, params, _) = engine.seen[-1]
    assert params.thinking_token_budget == 7
    assert params.repetition_detection == RepetitionDetectionParams(4, 0, 3)
    for wrong in (
        {"thinking_token_budget": -2},
        {"repetition_detection": {"min_count": -1, "max_pattern_size": 1}},
    ):
        assert (
            next(iter(wrong)) in error_of(post(url, PATH, {"prompt": "a", **wrong}), 400)["param"]
        )


def test_fields_that_nobody_knows_are_looked_for_without_walking_through_a_prompt() -> None:
    """A prompt is thousands of token ids, and this happens for each request."""
    from vllmx.entrypoints.openai.protocol_completion import CompletionRequest

    class Unwalked(list):
        def __iter__(self):
            raise AssertionError("walked through")

    body = CompletionRequest(prompt=[5, 6], stream_options={"odd": 1}, stream=True, other=2)
    body.prompt = Unwalked([5, 6])
    assert list(body.unknown_fields()) == ["other", "stream_options.odd"]
