# SPDX-License-Identifier: Apache-2.0
"""A chat's reasoning is a field of its own; the worker says letters, of which some are markers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.helpers import (
    MODEL,
    EngineDouble,
    client,
    engine_over,
    events,
    post,
    running_server,
)

from vllmx.config import ServerConfig
from vllmx.entrypoints.openai.api_server import build_app
from vllmx.reasoning import ReasoningParserManager
from vllmx.reasoning.text_markers import TextMarkerReasoningParser

MESSAGES = [{"role": "user", "content": "hi"}]
CHATS = "/v1/chat/completions"


class Letters(TextMarkerReasoningParser):
    """Between vw and zab. The worker begins with v after the prompt of MESSAGES."""

    starts = ("vw",)
    ends = ("zab",)


@pytest.fixture(scope="module")
def reasoning_url(model_folder: Path) -> Iterator[str]:
    """A server over the real engine with that parser."""
    ReasoningParserManager.register_module("letters", module=Letters)
    engine = engine_over(model_folder, "LetterWorker", MODEL)
    engine.vllm_config.structured_outputs_config.reasoning_parser = "letters"
    try:
        with running_server(build_app(engine, engine.vllm_config, ServerConfig())) as url:
            yield url
    finally:
        engine.shutdown()
        del ReasoningParserManager.reasoning_parsers["letters"]


@pytest.mark.parametrize(
    ("max_tokens", "reasoning", "content"),
    [(10, "xy", "cde"), (7, "xy", None), (6, "xyza", None), (1, None, "v")],
)
@pytest.mark.parametrize("shown", [True, False])
def test_whole_and_streamed(reasoning_url: str, max_tokens, reasoning, content, shown) -> None:
    """A marker that the length cuts off is part of the text around it."""
    api = client(reasoning_url)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": max_tokens, "n": 2}
    asked["extra_body"] = {"include_reasoning": shown}
    wanted = (reasoning if shown else None, content)
    for choice in api.chat.completions.create(**asked).choices:
        assert (choice.message.reasoning, choice.message.content) == wanted
    said: dict[tuple[int, str], str] = {}
    ends = []
    for chunk in api.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            for name, text in choice.delta.model_dump(exclude_unset=True).items():
                key = (choice.index, name)
                said[key] = said.get(key, "") + (text or "")
            ends += [choice.finish_reason] if choice.finish_reason else []
    assert ends == ["length", "length"]
    for index in range(2):
        got = tuple(said.get((index, name)) or None for name in ("reasoning", "content"))
        assert got == wanted


@pytest.mark.parametrize("stop", [["never there"], ["dq", "de"], ["y"]], ids=str)
def test_a_stream_with_stop_strings_says_the_same(reasoning_url: str, stop) -> None:
    api = client(reasoning_url)
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "stop": stop}
    (plain,) = api.chat.completions.create(**asked).choices
    said, end = {"reasoning": "", "content": ""}, None
    for chunk in api.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            for name, text in choice.delta.model_dump(exclude_unset=True).items():
                if name in said:
                    said[name] += text or ""
            end = choice.finish_reason or end
    assert said["reasoning"] == (plain.message.reasoning or "")
    assert said["content"] == (plain.message.content or "")
    assert end == plain.finish_reason == ("length" if stop == ["never there"] else "stop")


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(model_folder: Path) -> None:
    ReasoningParserManager.register_module("few_letters", module=Letters)
    engine = EngineDouble(model_folder, "vwhyzabso")
    engine.vllm_config.structured_outputs_config.reasoning_parser = "few_letters"
    body = {"messages": MESSAGES, "max_tokens": 9, "logprobs": True, "top_logprobs": 2}
    try:
        with running_server(build_app(engine, engine.vllm_config, ServerConfig())) as url:
            plain = post(url, CHATS, body).json()["choices"][0]
            chunks = events(post(url, CHATS, {**body, "stream": True}))
    finally:
        del ReasoningParserManager.reasoning_parsers["few_letters"]
    assert (plain["message"]["reasoning"], plain["message"]["content"]) == ("hy", "so")
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    for name in ("reasoning", "content"):
        joined = "".join(choice["delta"].get(name) or "" for choice in choices)
        assert joined == plain["message"][name]
    held = [choice["logprobs"]["content"] for choice in choices if choice.get("logprobs")]
    tokens = [entry["token"] for entries in held for entry in entries]
    assert tokens == [entry["token"] for entry in plain["logprobs"]["content"]]
    assert "".join(tokens) == "vwhyzabso"


def test_an_echo_stands_before_the_content(reasoning_url: str) -> None:
    last = {"role": "assistant", "content": "well: "}
    echoed = {"echo": True, "continue_final_message": True, "add_generation_prompt": False}
    body = {"messages": [*MESSAGES, last], "max_tokens": 10, **echoed}
    message = post(reasoning_url, CHATS, body).json()["choices"][0]["message"]
    # Another prompt, after which the worker begins with another letter: there is no reasoning.
    assert message["reasoning"] is None
    assert message["content"].startswith("well: ") and len(message["content"]) == 16


def test_without_a_parser_all_is_content(letters_url: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 10}
    message = post(letters_url, CHATS, body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (None, "vwxyzabcde")
