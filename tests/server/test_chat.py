# SPDX-License-Identifier: Apache-2.0
"""/v1/chat/completions over a scripted engine: template, roles, logprobs, streams."""

from __future__ import annotations

from pathlib import Path
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
    running_server,
    strict_json,
    write_model_folder,
)

from vllmx.config import ServerConfig
from vllmx.entrypoints.openai.api_server import build_app

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def chat(url: str, **body: Any) -> dict[str, Any]:
    """The body of an answer that must succeed."""
    response = post(url, PATH, {"messages": MESSAGES, "max_tokens": 4, **body})
    assert response.status_code == 200, response.text
    return strict_json(response.text)


def stream(url: str, **body: Any) -> list[Any]:
    """The events of a streamed answer that must succeed."""
    response = post(url, PATH, {"messages": MESSAGES, "max_tokens": 4, "stream": True, **body})
    assert response.status_code == 200, response.text
    return events(response)


def test_openai_client_reads_plain_and_streamed_answers(url: str) -> None:
    api = client(url)
    plain = api.chat.completions.create(model=MODEL, messages=MESSAGES, max_completion_tokens=5)
    assert plain.choices[0].message.content == "Hello"
    assert plain.choices[0].message.role == "assistant"
    chunks = list(
        api.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello"
    assert chunks[-1].usage.completion_tokens == 5
    assert chunks[-1].usage == plain.usage or chunks[-1].usage.total_tokens == (
        plain.usage.total_tokens
    )


def test_template_makes_the_prompt_and_nothing_is_added_to_it(
    engine: EngineDouble, url: str
) -> None:
    body = chat(url, return_prompt_text=True, return_token_ids=True)
    assert body["prompt_text"] == PROMPT
    assert engine.seen[0][0]["prompt_token_ids"] == body["prompt_token_ids"] == ids(PROMPT)


def test_room_left_is_the_default_output_length(engine: EngineDouble, url: str) -> None:
    chat(url, max_tokens=None)
    chat(url, max_tokens=7, max_completion_tokens=3)
    room = 128 - len(ids(PROMPT))
    assert [seen[1].max_tokens for seen in engine.seen] == [room, 3]


def test_text_parts_are_joined_for_a_string_template(engine: EngineDouble, url: str) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(url, messages=[{"role": "user", "content": parts}])
    assert "user\na\nb<|im_end|>" in engine.seen[0][0]["prompt"]


@pytest.mark.parametrize("streamed", [False, True])
def test_n_choices_are_numbered_and_counted(url: str, streamed: bool) -> None:
    if not streamed:
        body = chat(url, n=3)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 12
        return
    chunks = stream(url, n=3, stream_options={"include_usage": True})
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        ends[choice["index"]] += choice["finish_reason"] is not None
    assert texts == ["Hell"] * 3
    assert ends == [1, 1, 1]
    assert chunks[-1]["usage"]["completion_tokens"] == 12


def test_every_chunk_has_finish_reason_and_the_role_comes_first(url: str) -> None:
    chunks = stream(url)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(set(c) >= {"index", "delta", "logprobs", "finish_reason"} for c in choices)
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices] == [None, None, None, None, "length"]
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


@pytest.mark.parametrize(
    ("options", "at_end", "in_chunks"),
    [
        (None, False, False),
        ({}, False, False),
        ({"include_usage": True}, True, False),
        ({"include_usage": True, "continuous_usage_stats": True}, True, True),
    ],
    ids=str,
)
def test_usage_is_streamed_only_as_asked(
    url: str, options: Any, at_end: bool, in_chunks: bool
) -> None:
    chunks = stream(url, stream_options=options)
    if at_end:
        assert chunks.pop()["choices"] == []
    assert all(chunk["choices"] for chunk in chunks)
    assert [bool(chunk.get("usage")) for chunk in chunks] == [in_chunks] * len(chunks)


def test_server_can_send_usage_in_every_stream(model_folder: Path) -> None:
    engine = EngineDouble(model_folder)
    config = ServerConfig(enable_force_include_usage=True)
    with running_server(build_app(engine, engine.vllm_config, config)) as url:
        assert stream(url)[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("top", "size"), [(None, 0), (0, 0), (1, 1), (5, 2), (-1, 2)])
def test_logprobs_show_as_many_alternatives_as_asked(url: str, top: int | None, size: int) -> None:
    fields = {"logprobs": True, **({} if top is None else {"top_logprobs": top})}
    content = chat(url, **fields)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["H", "e", "l", "l"]
    assert content[0]["bytes"] == [72]
    assert content[0]["logprob"] == -0.5
    assert {len(entry["top_logprobs"]) for entry in content} == {size}
    streamed = [c["choices"][0]["logprobs"] for c in stream(url, **fields)]
    assert [entry for part in streamed if part for entry in part["content"]] == content


def test_infinite_logprobs_become_minus_9999(engine: EngineDouble, url: str) -> None:
    engine.logprob = float("-inf")
    content = chat(url, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert content[0]["logprob"] == -9999.0
    assert [entry["logprob"] for entry in content[0]["top_logprobs"]] == [-9999.0, -9999.0]


@pytest.mark.parametrize("streamed", [False, True])
def test_continued_message_keeps_its_role_and_can_be_echoed(
    engine: EngineDouble, url: str, streamed: bool
) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "So: "}]
    fields = {"messages": messages, "continue_final_message": True, "echo": True}
    if streamed:
        deltas = [chunk["choices"][0]["delta"] for chunk in stream(url, **fields)]
        text = "".join(delta.get("content", "") for delta in deltas)
    else:
        text = chat(url, **fields)["choices"][0]["message"]["content"]
    assert text == "So: Hell"
    assert engine.seen[0][0]["prompt"].endswith("<|im_start|>assistant\nSo: ")


def test_tools_that_may_not_be_used_are_fine(url: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat(url, tools=tools, tool_choice="none")["choices"]
    assert chat(url, tool_choice="none")["choices"]
    assert chat(url, response_format={"type": "text"})["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": []}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"use_beam_search": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True, "n": 0}, "n"),
        ({"use_beam_search": True, "n": 11}, "n"),
        ({"use_beam_search": True, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"use_beam_search": True, "max_tokens": 0}, "max_tokens"),
        (
            {"use_beam_search": True, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_what_is_not_built_is_refused_by_name(
    engine: EngineDouble, url: str, fields: dict[str, Any], param: str
) -> None:
    error = error_of(post(url, PATH, {"messages": MESSAGES, **fields}), 400)
    assert error["param"] == param
    assert param.split(".")[0].removesuffix("s") in error["message"]
    assert not engine.seen


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{"content": "no role"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "critic", "content": "template says no"}],
        "hello",
        [[]],
        None,
    ],
    ids=str,
)
def test_bad_messages_are_400_before_a_stream_starts(
    engine: EngineDouble, url: str, messages: Any, streamed: bool
) -> None:
    error = error_of(post(url, PATH, {"messages": messages, "stream": streamed}), 400)
    if messages and messages[0] == {"role": "critic", "content": "template says no"}:
        assert "no critics here" in error["message"]
    assert not engine.seen


def test_chat_without_template_is_400(tmp_path: Path) -> None:
    engine = EngineDouble(write_model_folder(tmp_path, chat_template=None))
    with running_server(build_app(engine, engine.vllm_config, ServerConfig())) as url:
        for streamed in (False, True):
            error = error_of(post(url, PATH, {"messages": MESSAGES, "stream": streamed}), 400)
            assert "template" in error["message"]
        assert post(url, "/v1/completions", {"prompt": "a"}).status_code == 200


def test_tokenize_shows_the_prompt_of_a_chat(url: str) -> None:
    body = strict_json(post(url, "/tokenize", {"messages": MESSAGES}).text)
    assert body["tokens"] == ids(PROMPT)
    assert body["count"] == len(ids(PROMPT))
    assert body["max_model_len"] == 128
    back = strict_json(post(url, "/detokenize", {"tokens": body["tokens"]}).text)
    assert back == {"prompt": PROMPT}
    plain = strict_json(post(url, "/tokenize", {"prompt": "é", "return_token_strs": True}).text)
    assert plain["token_strs"] == ["Ã", "©"]
    for path, bad in (("/tokenize", {}), ("/tokenize", {"prompt": 5}), ("/detokenize", {})):
        error_of(post(url, path, bad), 400)
    for token in (-1, 99999, 2**70):
        error_of(post(url, "/detokenize", {"tokens": [token]}), 400)
