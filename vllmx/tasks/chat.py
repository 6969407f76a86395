# SPDX-License-Identifier: Apache-2.0
"""`vllmx chat`: a conversation on the terminal, with an engine here or a server elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.tasks import local, prompts
from vllmx.tasks.http_client import Client
from vllmx.tasks.sampling import check_shown, given, sampling_params

Messages = list[dict[str, Any]]
Answerer = Callable[[Messages], Iterator[str]]


def run(config: RunConfig, started: float) -> int:
    """One answer for --messages or --prompt; otherwise a turn for each line of stdin."""
    fields = given(config.sampling)
    check_shown(fields, "text")
    if fields.get("n", 1) != 1:
        raise UserError("sampling.n: a conversation has one answer a turn.")
    if config.prompt is not None and config.messages is not None:
        raise UserError("both --prompt and --messages are given; choose one.")
    messages: Messages | None = None
    if config.messages is not None:
        messages = prompts.read_messages(config.messages)
    elif config.prompt is not None:
        prompts.text_item("prompt", config.prompt)
        messages = [{"role": "user", "content": config.prompt}]
    with (_on_server if config.server.url else _here)(config, fields) as answer:
        if messages is not None:
            show(answer(messages))
        else:
            converse(answer, sys.stdin.isatty())
    return 0


def converse(answer: Answerer, interactive: bool) -> None:
    """Answer each line of stdin with the whole conversation so far, until it ends."""
    conversation: Messages = []
    for line in ask(interactive):
        turn = [*conversation, {"role": "user", "content": line}]
        try:
            reply = show(answer(turn))
        except UserError as error:
            if not interactive:
                raise
            print(f"vllmx: error: {error}", file=sys.stderr)  # the turn is dropped
            continue
        conversation = [*turn, {"role": "assistant", "content": reply}]


def ask(interactive: bool) -> Iterator[str]:
    """The lines of stdin that aren't blank, with a prompt sign on stderr for a person."""
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\r\n")


def show(pieces: Iterator[str]) -> str:
    """Print the pieces of an answer as they come, and a line end; returns the answer."""
    text = ""
    for piece in pieces:
        text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)
    return text


def connect(config: RunConfig) -> Client:
    """The server of server.url, and the model of the config by its name there."""
    assert config.server.url is not None
    model = config.model.model or config.model.name
    return Client(config.server.url, config.server.api_key, model)


@contextmanager
def _on_server(config: RunConfig, fields: dict[str, Any]) -> Iterator[Answerer]:
    client = connect(config)
    yield lambda messages: client.chat(messages, fields)


@contextmanager
def _here(config: RunConfig, fields: dict[str, Any]) -> Iterator[Answerer]:
    with local.load(config) as llm:
        params = sampling_params(llm.get_default_sampling_params(), {"max_tokens": None, **fields})

        def answer(messages: Messages) -> Iterator[str]:
            prompt = local.chat_prompt(llm, messages)
            for output in local.stream(llm, [(prompt, params)], ["chat"]):
                yield output.outputs[0].text

        yield answer
