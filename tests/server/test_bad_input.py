# SPDX-License-Identifier: Apache-2.0
"""Whatever a client sends, the answer is 400, 401, 404 or 405 in OpenAI's shape, never 500."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import openai
import pytest
from server.helpers import (
    HTTP,
    MODEL,
    EngineDouble,
    client,
    error_of,
    get,
    post,
    running_server,
)

from vllmx.config import ServerConfig
from vllmx.entrypoints.openai.api_server import build_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
BASE = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": MESSAGES}}

BAD_SAMPLING: list[tuple[str, Any]] = [
    *(
        (name, value)
        for name in ("temperature", "top_p", "min_p")
        for value in (-1, "x", [], 1e999)
    ),
    *(("n", value) for value in (0, -1, 1.5, "x", 10**30)),
    *(("max_tokens", value) for value in (-1, 10**6, 10**30, "x", 2.5)),
    *(("top_k", value) for value in (-2, "x", 10**30)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, "x", 1.5)),
    ("top_p", 0),
    ("top_p", 1.1),
    ("min_p", 1.5),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("stop", 5),
    ("stop", [""]),
    ("stop", [1]),
    ("stop_token_ids", ["x"]),
    ("stop_token_ids", [1.5]),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", [1]),
    ("bad_words", [""]),
    ("bad_words", "x"),
    ("prompt_logprobs", -2),
    ("truncate_prompt_tokens", -2),
    ("truncate_prompt_tokens", 1000),
    ("truncation_side", "up"),
    ("response_format", {"type": "xml"}),
    ("stream", "perhaps"),
    ("cache_salt", ""),
    ("model", 5),
    *(
        ("repetition_detection", {"max_pattern_size": 3, "min_count": 3, name: value})
        for name in ("max_pattern_size", "min_pattern_size", "min_count")
        for value in (2.5, "x", -1, 2**70, [1])
    ),
    ("vllm_xargs", {"a": 2**70}),
    ("vllm_xargs", {"a": ["\ud800"]}),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), BAD_SAMPLING, ids=lambda v: str(v)[:24])
def test_sampling_value_out_of_range_is_400_naming_it(
    engine: EngineDouble, url: str, path: str, name: str, value: Any
) -> None:
    for streamed in (False, True):
        body = {**BASE[path], "stream": streamed, name: value}
        error = error_of(post(url, path, body), 400)
        assert name in error["message"]
        assert "\n" not in error["message"]
    assert not engine.running
    assert post(url, path, BASE[path]).status_code == 200


@pytest.mark.parametrize(
    ("path", "name", "words"),
    [
        (COMPLETIONS, "logprobs", "`logprobs` must be a positive value."),
        (COMPLETIONS, "prompt_logprobs", "`prompt_logprobs` must be a positive value or -1."),
        (CHAT, "prompt_logprobs", "`prompt_logprobs` must be a positive value or -1."),
        (CHAT, "top_logprobs", "`top_logprobs` must be a positive value or -1."),
    ],
)
def test_negative_counts_of_logprobs_are_refused_in_upstreams_words(
    url: str, path: str, name: str, words: str
) -> None:
    error = error_of(post(url, path, {**BASE[path], name: -3}), 400)
    assert error["param"] == name and error["message"].startswith(words)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_refused(url: str, path: str, literal: str) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        raw = json.dumps(BASE[path])[:-1] + f', "{name}": {literal}}}'
        assert name in error_of(post(url, path, raw.encode()), 400)["message"]


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        [],
        None,
        [""],
        [[]],
        [-1],
        [[-1]],
        [260],
        [4611686018427387904],
        [10**30],
        [1.5],
        ["a", 1],
        ["a", [1]],
        [[1], "a"],
        [True],
        [[True]],
        [None],
        {},
        5,
        True,
        {"a": 1},
        [{}],
        "x" * 129,
        [5] * 128,
        ["ok", "x" * 500],
        "\ud800",
    ],
    ids=lambda v: repr(v)[:30],
)
def test_bad_prompt_is_400_before_a_stream_starts(url: str, prompt: Any) -> None:
    for fields in ({}, {"stream": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}):
        error = error_of(post(url, COMPLETIONS, {"prompt": prompt, **fields}), 400)
        assert error["param"] in ("prompt", "input_tokens", "max_tokens")
    assert post(url, COMPLETIONS, BASE[COMPLETIONS]).status_code == 200


def test_too_long_prompt_names_the_lengths(url: str) -> None:
    error = error_of(post(url, COMPLETIONS, {"prompt": "x" * 120, "max_tokens": 20}), 400)
    for number in ("128 tokens", "20 output tokens", "120 input tokens", "140 tokens"):
        assert number in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b'{"prompt": }',
        b"[]",
        b'"text"',
        b"5",
        b"null",
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"prompt": "a", "max_tokens": 1' + b"0" * 5000 + b"}",
    ],
    ids=lambda raw: repr(raw[:12]),
)
def test_what_is_not_a_json_object_is_400(url: str, path: str, raw: bytes) -> None:
    error_of(post(url, path, raw), 400)


def test_invalid_json_says_where(url: str) -> None:
    assert "character 11" in error_of(post(url, COMPLETIONS, b'{"prompt": }'), 400)["message"]


def test_other_content_types_are_refused(url: str) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
        response = post(url, COMPLETIONS, BASE[COMPLETIONS], headers={"content-type": kind})
        assert "application/json" in error_of(response, 400)["message"]
    fine = {"content-type": "application/json; charset=utf-8"}
    assert post(url, COMPLETIONS, BASE[COMPLETIONS], headers=fine).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_unknown_model_is_404(url: str, path: str) -> None:
    for streamed in (False, True):
        response = post(url, path, {**BASE[path], "model": "gpt-9", "stream": streamed})
        error = error_of(response, 404)
        assert error["type"] == "NotFoundError"
        assert error["param"] == "model"
        assert "`gpt-9` does not exist" in error["message"]
    with pytest.raises(openai.NotFoundError):
        client(url).completions.create(model="gpt-9", prompt="a")


def test_unknown_route_is_404_and_wrong_method_405(url: str) -> None:
    error_of(get(url + "/v1/nothing"), 404)
    error_of(get(url + "/v1/models/nothing/at/all"), 404)
    response = get(url + COMPLETIONS)
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_union_errors_are_one_readable_line(url: str) -> None:
    error = error_of(post(url, COMPLETIONS, {"prompt": "a", "stop": 5}), 400)
    assert error["param"] == "stop"
    assert error["message"].startswith("stop: ")
    assert "function" not in error["message"]
    error = error_of(post(url, CHAT, {"messages": [{"role": 5, "content": "x"}]}), 400)
    assert error["param"] == "messages[0].role"


@pytest.mark.parametrize(
    ("path", "fields", "unknown"),
    [
        (COMPLETIONS, {"foo": 1}, ["foo"]),
        (COMPLETIONS, {"temprature": 1, "top_p": 0.5}, ["temprature"]),
        (COMPLETIONS, {"stream": True, "stream_options": {"usage": 1}}, ["stream_options.usage"]),
        (CHAT, {"messages": [{**MESSAGES[0], "mood": "good"}]}, ["messages[0].mood"]),
        (
            CHAT,
            {
                "tools": [{"type": "function", "function": {"name": "f", "color": 1}}],
                "tool_choice": "none",
                "zoo": None,
            },
            ["zoo", "tools[0].function.color"],
        ),
        (COMPLETIONS, {}, []),
        (
            CHAT,
            {
                "logprobs": True,
                "top_logprobs": 1,
                "max_completion_tokens": 2,
                "user": "u",
                "response_format": {"type": "text"},
                "parallel_tool_calls": False,
                "tools": [{"type": "function", "function": {"name": "f", "strict": True}}],
                "tool_choice": "none",
            },
            [],
        ),
        (COMPLETIONS, {"evil\nWARNING all is well": 1}, ["'evil\\nWARNING all is well'"]),
    ],
    ids=str,
)
def test_unknown_fields_are_named_in_one_warning(
    url: str,
    caplog: pytest.LogCaptureFixture,
    path: str,
    fields: dict[str, Any],
    unknown: list[str],
) -> None:
    with caplog.at_level(logging.WARNING, logger="vllmx"):
        assert post(url, path, {**BASE[path], **fields}).status_code == 200
    warnings = [record.getMessage() for record in caplog.records if "unknown" in record.msg]
    if not unknown:
        assert warnings == []
        return
    (warning,) = warnings
    assert sorted(warning.split(": ", 1)[1].split(", ")) == sorted(unknown)


def test_api_key_is_needed_for_the_api_alone(model_folder: Path) -> None:
    engine = EngineDouble(model_folder)
    app = build_app(engine, engine.vllm_config, ServerConfig(api_key="secret"))
    with running_server(app) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            response = post(url, COMPLETIONS, BASE[COMPLETIONS], headers=headers)
            assert error_of(response, 401)["type"] == "Unauthorized"
        error_of(get(url + "/v1/models"), 401)
        error_of(post(url, "/tokenize", {"prompt": "a"}), 401)
        for path in ("/health", "/ping", "/version", "/metrics"):
            assert get(url + path).status_code == 200
        answer = client(url, api_key="secret").completions.create(model=MODEL, prompt="a")
        assert answer.choices[0].text
        with pytest.raises(openai.AuthenticationError):
            client(url, api_key="wrong").models.list()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
def test_body_beyond_the_limit_is_413(model_folder: Path, path: str) -> None:
    engine = EngineDouble(model_folder)
    fits = json.dumps({**BASE.get(path, {"prompt": "ab"}), "user": "x" * 900}).encode()
    longer = fits + b" " * (1000 - len(fits) + 1)
    app = build_app(engine, engine.vllm_config, ServerConfig(max_request_bytes=1000))
    with running_server(app) as url:
        assert post(url, path, fits).status_code == 200
        error = error_of(post(url, path, longer), 413)
        assert "1000 bytes of server.max_request_bytes" in error["message"]
        pieces = (longer[i : i + 100] for i in range(0, len(longer), 100))  # no Content-Length
        headers = {"content-type": "application/json"}
        error_of(HTTP.post(url + path, content=pieces, headers=headers), 413)
        assert post(url, path, fits).status_code == 200


def test_prompt_of_text_needs_a_tokenizer(model_folder: Path) -> None:
    engine = EngineDouble(model_folder)
    tokenizer = engine.tokenizer
    engine.tokenizer = None
    app = build_app(engine, engine.vllm_config, ServerConfig())
    engine.tokenizer = tokenizer  # the double itself decodes
    with running_server(app) as url:
        assert (
            "skip_tokenizer_init"
            in error_of(post(url, COMPLETIONS, {"prompt": "a"}), 400)["message"]
        )
        error_of(post(url, CHAT, {"messages": MESSAGES}), 400)
        assert post(url, COMPLETIONS, {"prompt": [1, 2]}).status_code == 200
