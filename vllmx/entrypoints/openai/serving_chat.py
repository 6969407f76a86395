# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/chat_completion/serving.py @ v0.25.0
"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fastapi import Request

from vllmx.entrypoints.chat_utils import render_chat
from vllmx.entrypoints.openai.errors import create_error_response
from vllmx.entrypoints.openai.protocol import (
    UsageInfo,
    now,
)
from vllmx.entrypoints.openai.protocol_chat import (
    ChatCompletionLogProb,
    ChatCompletionLogProbs,
    ChatCompletionLogProbsContent,
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatCompletionResponseStreamChoice,
    ChatCompletionStreamResponse,
    ChatMessage,
    ConversationFields,
    DeltaMessage,
)
from vllmx.entrypoints.openai.serving import (
    OpenAIServing,
    RenderedPrompt,
    clamp_logprob,
    fit_prompt,
    prompt_logprobs_body,
    should_include_usage,
)
from vllmx.entrypoints.openai.streams import SSE_DONE, EventStream, StartedStream, sse
from vllmx.exceptions import VLLMValidationError
from vllmx.reasoning import ReasoningParser, get_reasoning_parser_cls
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.logprobs import Logprob
    from vllmx.model_loader.tokenizer import Tokenizer
    from vllmx.outputs import CompletionOutput, RequestOutput

ASSISTANT = "assistant"


def render_messages(
    tokenizer: Tokenizer,
    body: ConversationFields,
    template_kwargs: dict[str, Any] | None,
) -> str:
    """The prompt's text for the messages of `body`, by the tokenizer's chat template.

    Raises VLLMValidationError with the template's message.
    """
    assert body.messages is not None
    return render_chat(
        tokenizer,
        [message.to_dict() for message in body.messages],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        tools=[tool.to_dict() for tool in body.tools] if body.tools else None,
        template_kwargs=template_kwargs,
    )


@dataclass
class _Answer:
    """What the chunks or the body of one answer have in common."""

    body: ChatCompletionRequest
    prompt: RenderedPrompt
    id: str
    created: int
    role: str
    echo: str

    @property
    def n(self) -> int:
        return self.body.n or 1


@dataclass
class _Splitter:
    """Takes a streamed answer apart into reasoning and content."""

    parser: ReasoningParser
    shows_reasoning: bool
    text: str = ""
    token_ids: list[int] = field(default_factory=list)

    def take(self, output: CompletionOutput) -> DeltaMessage | None:
        """What is to be sent of the text that has come; None for nothing."""
        delta = None
        if output.text or output.token_ids:
            new_ids = list(output.token_ids)
            text, token_ids = self.text + output.text, self.token_ids + new_ids
            delta = self.parser.extract_reasoning_streaming(
                self.text, text, output.text, self.token_ids, token_ids, new_ids
            )
            self.text, self.token_ids = text, token_ids
        parts = [delta, self.parser.finish() if output.finish_reason else None]
        reasoning = "".join(part.reasoning or "" for part in parts if part is not None)
        content = "".join(part.content or "" for part in parts if part is not None)
        sent: dict[str, str] = {}
        if reasoning and self.shows_reasoning:
            sent["reasoning"] = reasoning
        if content:
            sent["content"] = content
        return DeltaMessage(**sent) if sent else None


class OpenAIServingChat(OpenAIServing):
    """Answers chat requests."""

    @cached_property
    def reasoning_parser_cls(self) -> type[ReasoningParser] | None:
        """Parser of the model's reasoning, if the server has one."""
        config = self.engine_client.vllm_config.structured_outputs_config
        if config is None or not config.reasoning_parser:
            return None
        return get_reasoning_parser_cls(config)

    def _reasoning_parser(self, answer: _Answer) -> ReasoningParser | None:
        """A parser for one answer; None where answers are not taken apart."""
        cls = self.reasoning_parser_cls
        if cls is None or not cls.takes_texts_apart():
            return None
        return cls(self.require_tokenizer(), **(answer.prompt.reasoning_parser_kwargs or {}))

    async def create_chat_completion(
        self, body: ChatCompletionRequest, raw_request: Request
    ) -> ChatCompletionResponse | EventStream:
        """The answer, or its events once the first output is there; raises before that."""
        self.check_request(body)
        prompt = await asyncio.to_thread(self._render, body)
        params = self.sampling_params(body, prompt, self.default_sampling_params.get("max_tokens"))
        parser_cls = self.reasoning_parser_cls
        if parser_cls and parser_cls.keeps_special_tokens and isinstance(params, SamplingParams):
            params.skip_special_tokens = False
        role = ASSISTANT if body.add_generation_prompt else body.messages[-1].role
        request_id = self.request_id("chatcmpl", body, raw_request)
        answer = _Answer(body, prompt, request_id, now(), role, _echo_text(body, role))
        results = self.run(prompt, params, request_id, body)
        if body.stream:
            started = await StartedStream.start(results)
            return EventStream(self._events(answer, started), started)
        final = None
        async for result in results:
            final = result
        assert final is not None
        return self._response(answer, final)

    def _render(self, body: ChatCompletionRequest) -> RenderedPrompt:
        tokenizer = self.require_tokenizer()
        kwargs = dict(body.chat_template_kwargs or {})
        if body.documents is not None:
            kwargs["documents"] = body.documents
        if body.reasoning_effort is not None:
            kwargs["reasoning_effort"] = body.reasoning_effort
            kwargs.setdefault("enable_thinking", body.reasoning_effort != "none")
        text = render_messages(tokenizer, body, kwargs)
        token_ids = self.encode(text, body)
        fitted = fit_prompt(token_ids, body, self.max_model_len)
        if not fitted:
            raise VLLMValidationError("The decoder prompt cannot be empty", parameter="messages")
        prompt = RenderedPrompt(fitted, text)
        if self.reasoning_parser_cls is not None:
            prompt.reasoning_ended = None if body.include_reasoning else True
            prompt.reasoning_parser_kwargs = {"chat_template_kwargs": kwargs}
        return prompt

    async def _events(
        self, answer: _Answer, results: StartedStream[RequestOutput]
    ) -> AsyncGenerator[str, None]:
        include_usage, continuous_usage = should_include_usage(
            answer.body.stream_options, self.server_config.enable_force_include_usage
        )
        num_prompt_tokens = len(answer.prompt.token_ids)
        num_tokens = [0] * answer.n
        splitters = self._splitters(answer)
        try:
            started = False
            async for result in results:
                if not started:
                    started = True
                    for chunk in self._first_chunks(answer, continuous_usage):
                        yield sse(chunk)
                for output in result.outputs:
                    num_tokens[output.index] += len(output.token_ids)
                    splitter = splitters[output.index] if splitters else None
                    choice = self._stream_choice(answer.body, output, splitter)
                    if choice is None:
                        continue
                    chunk = self._chunk(answer, [choice])
                    if continuous_usage:
                        chunk.usage = UsageInfo.of(num_prompt_tokens, num_tokens[output.index])
                    yield sse(chunk)
            if include_usage:
                chunk = self._chunk(answer, [])
                chunk.usage = UsageInfo.of(num_prompt_tokens, sum(num_tokens))
                yield sse(chunk)
        except Exception as exc:
            yield sse(create_error_response(exc))
        yield SSE_DONE

    def _chunk(
        self, answer: _Answer, choices: list[ChatCompletionResponseStreamChoice]
    ) -> ChatCompletionStreamResponse:
        return ChatCompletionStreamResponse(
            id=answer.id,
            object="chat.completion.chunk",
            created=answer.created,
            model=self.models.model_name,
            choices=choices,
        )

    def _first_chunks(
        self, answer: _Answer, continuous_usage: bool
    ) -> list[ChatCompletionStreamResponse]:
        """A chunk a choice that gives the role, then one with the echoed text if there is any."""
        body = answer.body
        deltas = [DeltaMessage(role=answer.role, content="")]
        if answer.echo:
            deltas.append(DeltaMessage(content=answer.echo))
        chunks = []
        for delta in deltas:
            for index in range(answer.n):
                choice = ChatCompletionResponseStreamChoice(
                    index=index, delta=delta, logprobs=None, finish_reason=None
                )
                chunk = self._chunk(answer, [choice])
                if continuous_usage:
                    chunk.usage = UsageInfo.of(len(answer.prompt.token_ids), 0)
                if delta.role and body.return_token_ids:
                    chunk.prompt_token_ids = answer.prompt.token_ids
                if delta.role and body.return_prompt_text:
                    chunk.prompt_text = answer.prompt.text
                chunks.append(chunk)
        return chunks

    def _splitters(self, answer: _Answer) -> list[_Splitter]:
        """One for each choice; none at all where answers are not taken apart."""
        parsers = [self._reasoning_parser(answer) for _ in range(answer.n)]
        shows = answer.body.include_reasoning
        return [_Splitter(parser, shows) for parser in parsers if parser is not None]

    def _stream_choice(
        self, body: ChatCompletionRequest, output: CompletionOutput, splitter: _Splitter | None
    ) -> ChatCompletionResponseStreamChoice | None:
        """What is new in one choice; None where there is nothing to tell."""
        logprobs = None
        if body.logprobs and output.token_ids:
            logprobs = self._logprobs(body, output)
        ids = list(output.token_ids) if body.return_token_ids else None
        delta: DeltaMessage | None = DeltaMessage(content=output.text)
        if splitter is not None:
            delta = splitter.take(output)
        said = output.text if splitter is None else delta
        if not (said or logprobs or output.finish_reason or ids):
            return None
        choice = ChatCompletionResponseStreamChoice(
            index=output.index,
            delta=delta or DeltaMessage(),
            logprobs=logprobs,
            finish_reason=output.finish_reason,
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if ids is not None:
            choice.token_ids = ids
        return choice

    def _response(self, answer: _Answer, result: RequestOutput) -> ChatCompletionResponse:
        body = answer.body
        choices = [
            ChatCompletionResponseChoice(
                index=output.index,
                message=self._message(answer, output.text),
                logprobs=self._logprobs(body, output) if body.logprobs else None,
                finish_reason=output.finish_reason or "stop",
                stop_reason=output.stop_reason,
                token_ids=list(output.token_ids) if body.return_token_ids else None,
            )
            for output in result.outputs
        ]
        num_generated = sum(len(output.token_ids) for output in result.outputs)
        asked = body.prompt_logprobs is not None
        return ChatCompletionResponse(
            id=answer.id,
            created=answer.created,
            model=self.models.model_name,
            choices=choices,
            usage=UsageInfo.of(len(answer.prompt.token_ids), num_generated),
            prompt_logprobs=prompt_logprobs_body(result.prompt_logprobs) if asked else None,
            prompt_token_ids=answer.prompt.token_ids if body.return_token_ids else None,
            prompt_text=answer.prompt.text if body.return_prompt_text else None,
        )

    def _message(self, answer: _Answer, text: str) -> ChatMessage:
        """The answer's text, its reasoning apart from it."""
        parser = self._reasoning_parser(answer)
        reasoning: str | None = None
        content: str | None = text
        if parser is not None:
            reasoning, content = parser.extract_reasoning(text, answer.body)
        if not answer.body.include_reasoning:
            reasoning = None
        if answer.echo:
            content = answer.echo + (content or "")
        return ChatMessage(role=answer.role, content=content, reasoning=reasoning)

    def _logprobs(
        self, body: ChatCompletionRequest, output: CompletionOutput
    ) -> ChatCompletionLogProbs:
        as_id = self.show_as_ids(body)
        num_top = body.top_logprobs or 0
        content = []
        for token_id, position in zip(output.token_ids, output.logprobs or [], strict=True):
            entry = position.get(token_id) if position else None
            shown = list((position or {}).items())[: num_top if num_top >= 0 else None]
            content.append(
                ChatCompletionLogProbsContent(
                    **self._logprob(token_id, entry, as_id),
                    top_logprobs=[
                        ChatCompletionLogProb(**self._logprob(i, e, as_id)) for i, e in shown
                    ],
                )
            )
        return ChatCompletionLogProbs(content=content)

    def _logprob(self, token_id: int, entry: Logprob | None, as_id: bool) -> dict[str, Any]:
        token = self.token_text(token_id, entry, as_id)
        text = token if entry is None or entry.decoded_token is None else entry.decoded_token
        return {
            "token": token,
            "logprob": clamp_logprob(entry.logprob if entry else float("-inf")),
            "bytes": list(text.encode("utf-8", errors="replace")),
        }


def _echo_text(body: ChatCompletionRequest, role: str) -> str:
    """Text of the last message where `echo` puts it in front of an answer of the same role."""
    last = body.messages[-1]
    if not body.echo or last.role != role or not last.content:
        return ""
    if isinstance(last.content, str):
        return last.content
    parts: list[str | Mapping[str, Any]] = list(last.content)
    return "\n".join(part if isinstance(part, str) else part.get("text", "") for part in parts)
