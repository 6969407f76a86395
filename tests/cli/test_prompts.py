# SPDX-License-Identifier: Apache-2.0
"""Prompt files, JSONL and message files; and what is wrong with a bad one."""

import io
import sys
from pathlib import Path

import pytest

from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.tasks import prompts


@pytest.fixture
def file(tmp_path: Path):
    def write(data: str | bytes, name: str = "prompts.txt") -> str:
        path = tmp_path / name
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        return str(path)

    return write


def texts(path: str) -> list[str | None]:
    return [item.prompt for item in prompts.read_file(path)]


def test_lines_are_prompts_byte_for_byte(file) -> None:
    assert texts(file("a, b\n It's {x}=${y} \ncafé 日本\u2028語\x0b\n")) == [
        "a, b",
        " It's {x}=${y} ",
        "café 日本\u2028語\x0b",
    ]


def test_windows_line_ends_and_blank_lines_at_the_end(file) -> None:
    assert texts(file("a\r\nb\r\n\n\n".replace("\n\n\n", "\n"))) == ["a", "b"]
    assert texts(file("a\nb\n\n\n")) == ["a", "b"]


def test_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\nb".encode())))
    assert texts("-") == ["é", "b"]


def test_jsonl_by_suffix_and_by_first_character(file) -> None:
    lines = '{"prompt": "a\\nb", "id": 7}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    lines += '{"prompt_token_ids": [1, 2]}\n'
    for name in ("p.jsonl", "p.txt"):
        first, second, third = prompts.read_file(file(lines, name))
        assert (first.prompt, first.id) == ("a\nb", 7)
        assert second.messages == [{"role": "user", "content": "x"}]
        assert third.prompt_token_ids == [1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n\nb\n", "p.txt:2 is empty"),
        ("", "p.txt:1 is empty"),
        ('{"prompt": "a"}\n{"prompt": \n', "p.txt:2: invalid JSON"),
        ('{"prompt": "a"}\n[1]\n', "p.txt:2: needs an object"),
        ('{"promt": "a"}', "Did you mean prompt?"),
        ('{"text": "a"}', "the keys are prompt, prompt_token_ids, messages, id"),
        ('{"prompt": ""}', "p.txt:1 is empty"),
        ('{"prompt": 3}', "prompt needs a string"),
        ('{"prompt": "a", "messages": []}', "exactly one of"),
        ('{"id": 1}', "exactly one of"),
        ('{"messages": []}', "not empty"),
        ('{"messages": [{"content": "x"}]}', "message 0 needs an object with a role"),
        ('{"prompt_token_ids": []}', "not empty"),
        ('{"prompt_token_ids": [true]}', "whole numbers"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
    ],
)
def test_bad_line_is_named(file, text: str | bytes, message: str) -> None:
    with pytest.raises(UserError) as caught:
        prompts.read_file(file(text, "p.txt"))
    assert message in str(caught.value)


def test_messages_file(file) -> None:
    messages = '[{"role": "user", "content": "x"}]'
    assert prompts.read_messages(file(messages)) == [{"role": "user", "content": "x"}]
    assert len(prompts.read_messages(file('{"messages": ' + messages + "}"))) == 1
    with pytest.raises(UserError, match="invalid JSON"):
        prompts.read_messages(file("[{"))
    with pytest.raises(UserError, match="not empty"):
        prompts.read_messages(file("{}"))


def test_missing_file_and_missing_prompt(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        prompts.read_file(str(tmp_path / "none"))
    with pytest.raises(UserError, match="Is a directory"):
        prompts.read_file(str(tmp_path))
    with pytest.raises(UserError, match="nothing to answer"):
        prompts.items(RunConfig())
    with pytest.raises(UserError, match="choose one"):
        prompts.items(RunConfig(prompt="a", prompt_file="b"))
