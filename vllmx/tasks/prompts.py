# SPDX-License-Identifier: Apache-2.0
"""Prompts and conversations from the config, from files and from stdin."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig
from vllmx.exceptions import UserError

KEYS = ("prompt", "prompt_token_ids", "messages", "id")


@dataclass
class Item:
    """One thing to answer; exactly one of prompt, prompt_token_ids and messages is set."""

    where: str
    """How an error names it: the file and line, or the flag."""
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: Any = None
    """Copied to the JSON output."""


def items(run: RunConfig) -> list[Item]:
    """What `generate` shall answer: --prompt, or the lines of --prompt-file."""
    if run.prompt is not None and run.prompt_file is not None:
        raise UserError("both --prompt and --prompt-file are given; choose one.")
    if run.prompt is not None:
        return [text_item("prompt", run.prompt)]
    if run.prompt_file is None:
        raise UserError("nothing to answer: give --prompt TEXT or --prompt-file FILE (- is stdin).")
    return read_file(run.prompt_file)


def text_item(where: str, text: str) -> Item:
    """A text prompt; UserError if it is empty."""
    if not text:
        raise UserError(f"{where} is empty: there is nothing to continue.")
    return Item(where, prompt=text)


def read_file(path: str) -> list[Item]:
    """The prompts of a text file (one a line) or JSONL file (by suffix, or if it begins with {)."""
    name = "stdin" if path == "-" else path
    lines = read_text(path).rstrip("\n").split("\n")
    jsonl = path.endswith(".jsonl") or lines[0].lstrip().startswith("{")
    found = []
    for number, line in enumerate(lines, 1):
        where = f"{name}:{number}"
        line = line.removesuffix("\r")
        found.append(_json_item(where, line) if jsonl else text_item(where, line))
    return found


def _json_item(where: str, line: str) -> Item:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: invalid JSON: {error.msg} at column {error.colno}.") from None
    if not isinstance(entry, dict):
        raise UserError(f"{where}: needs an object with prompt, prompt_token_ids or messages.")
    for key in entry:
        if key not in KEYS:
            listed = f"the keys are {', '.join(KEYS)}"
            raise UserError(f"{where}: no key {key!r}; {listed}.{did_you_mean(key, KEYS)}")
    kinds = [key for key in KEYS[:3] if entry.get(key) is not None]
    if len(kinds) != 1:
        raise UserError(f"{where}: needs exactly one of prompt, prompt_token_ids and messages.")
    if kinds == ["prompt"]:
        if not isinstance(entry["prompt"], str):
            raise UserError(f"{where}: prompt needs a string, got {entry['prompt']!r}.")
        text_item(where, entry["prompt"])
    elif kinds == ["messages"]:
        check_messages(where, entry["messages"])
    elif not _is_ids(entry["prompt_token_ids"]):
        raise UserError(f"{where}: prompt_token_ids needs a list of whole numbers, not empty.")
    return Item(where, **entry)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def check_messages(where: str, value: Any) -> list[dict[str, Any]]:
    """`value` if it is a conversation, a list of objects that each have a role; else UserError."""
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: messages needs a list of objects, not empty.")
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise UserError(f"{where}: message {number} needs an object with a role and content.")
    return value


def read_messages(path: str) -> list[dict[str, Any]]:
    """The conversation of a JSON file: a list of messages, or an object with `messages`."""
    name = "stdin" if path == "-" else path
    try:
        value = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise UserError(f"{name}: invalid JSON: {error.msg} at {place}.") from None
    return check_messages(name, value.get("messages") if isinstance(value, dict) else value)


def read_text(path: str) -> str:
    """All of a UTF-8 file, or of stdin for `-`; line ends other than \\n are kept."""
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 at byte {error.start}.") from None
