# SPDX-License-Identifier: Apache-2.0
"""`vllmx complete`: continue a text, or each line of stdin, here or on a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.tasks import local, prompts
from vllmx.tasks.chat import ask, connect, show
from vllmx.tasks.sampling import check_shown, given, sampling_params

Completer = Callable[[str], Iterator[str]]


def run(config: RunConfig, started: float) -> int:
    """Continue --prompt, or each line of stdin on its own."""
    fields = given(config.sampling)
    check_shown(fields, "text")
    if fields.get("n", 1) != 1:
        raise UserError("sampling.n: `complete` shows one continuation; `generate` shows several.")
    if config.prompt is not None:
        prompts.text_item("prompt", config.prompt)
    with (_on_server if config.server.url else _here)(config, fields) as complete:
        for text in [config.prompt] if config.prompt is not None else ask(sys.stdin.isatty()):
            show(complete(text))
    return 0


@contextmanager
def _on_server(config: RunConfig, fields: dict[str, Any]) -> Iterator[Completer]:
    client = connect(config)
    yield lambda text: client.complete(text, fields)


@contextmanager
def _here(config: RunConfig, fields: dict[str, Any]) -> Iterator[Completer]:
    with local.load(config) as llm:
        params = sampling_params(llm.get_default_sampling_params(), fields)

        def complete(text: str) -> Iterator[str]:
            for output in local.stream(llm, [(text, params)], ["prompt"]):
                yield output.outputs[0].text

        yield complete
