# SPDX-License-Identifier: Apache-2.0
"""An engine in this process, driven step by step so that text can be shown as it comes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllmx import compose
from vllmx.config import RunConfig, finalize
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.entrypoints.llm import LLM
    from vllmx.outputs import RequestOutput
    from vllmx.sampling_params import SamplingParams


def require_model(run: RunConfig) -> None:
    """UserError with the names of conf/model if no model was chosen."""
    if not run.model.model and run.model.source is None:
        raise UserError(
            f"no model is given: name one of {', '.join(compose.choices('model'))}, or a path."
        )


def load(run: RunConfig) -> LLM:
    """Build the engine that `run` describes; this is where torch is imported."""
    require_model(run)
    from vllmx.entrypoints.llm import LLM

    return LLM(config=finalize(run))


def stream(
    llm: LLM, requests: Sequence[tuple[Any, SamplingParams]], where: Sequence[str]
) -> Iterator[RequestOutput]:
    """Answer all (prompt, params) at once; yields what each step brings, `request_id` is the index.

    A prompt that is refused raises with its entry of `where` in front of the message.
    """
    engine = llm.llm_engine
    for index, (prompt, params) in enumerate(requests):
        try:
            engine.add_request(str(index), prompt, params)
        except ValueError as error:
            raise UserError(f"{where[index]}: {error}") from error
    while engine.has_unfinished_requests():
        yield from engine.step()


def chat_prompt(llm: LLM, messages: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The token ids of a conversation, by the model's chat template."""
    from vllmx.entrypoints.chat_utils import render_chat

    tokenizer = llm.get_tokenizer()
    text = render_chat(tokenizer, messages)  # get_tokenizer has put model.chat_template in
    return {"prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}
