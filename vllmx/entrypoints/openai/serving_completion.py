# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/completion/serving.py @ v0.25.0
"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import Request

from vllmx.entrypoints.openai.errors import create_error_response
from vllmx.entrypoints.openai.protocol import (
    UsageInfo,
    now,
)
from vllmx.entrypoints.openai.protocol_completion import (
    DEFAULT_MAX_TOKENS,
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllmx.entrypoints.openai.serving import (
    OpenAIServing,
    RenderedPrompt,
    clamp_logprob,
    fit_prompt,
    prompt_logprobs_body,
    should_include_usage,
)
from vllmx.entrypoints.openai.streams import (
    SSE_DONE,
    EventStream,
    StartedStream,
    merge_async_iterators,
    sse,
)
from vllmx.exceptions import VLLMValidationError

if TYPE_CHECKING:
    from vllmx.logprobs import Logprob
    from vllmx.outputs import CompletionOutput, RequestOutput

Logprobs = Sequence[Mapping[int, "Logprob"] | None]


@dataclass
class _Answer:
    """What the chunks or the body of one answer have in common."""

    body: CompletionRequest
    prompts: list[RenderedPrompt]
    id: str
    created: int

    @property
    def n(self) -> int:
        return self.body.n or 1


@dataclass
class _Choice:
    """How far the stream of one choice has come."""

    num_tokens: int = 0
    text_offset: int = 0
    started: bool = False


class OpenAIServingCompletion(OpenAIServing):
    """Answers completion requests."""

    async def create_completion(
        self, body: CompletionRequest, raw_request: Request
    ) -> CompletionResponse | EventStream:
        """The answer, or its events once the first output is there; raises before that."""
        self.check_request(body)
        prompts = await asyncio.to_thread(self._render, body)
        answer = _Answer(body, prompts, self.request_id("cmpl", body, raw_request), now())
        default = self.default_sampling_params.get("max_tokens", DEFAULT_MAX_TOKENS)
        all_params = [
            self.sampling_params(body, prompt, min(default, DEFAULT_MAX_TOKENS))
            for prompt in prompts
        ]
        results = merge_async_iterators(
            *(
                self.run(prompt, params, f"{answer.id}-{i}", body)
                for i, (prompt, params) in enumerate(zip(prompts, all_params, strict=True))
            )
        )
        if body.stream:
            started = await StartedStream.start(results)
            return EventStream(self._events(answer, started), started)
        final: dict[int, RequestOutput] = {}
        async for prompt_index, output in results:
            final[prompt_index] = output
        return self._response(answer, [final[i] for i in range(len(prompts))])

    def _render(self, body: CompletionRequest) -> list[RenderedPrompt]:
        """The prompts as token ids, with their text where echo needs it."""
        prompt = body.prompt
        single = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [self._render_one(item, body) for item in ([prompt] if single else prompt)]

    def _render_one(self, prompt: str | list[int], body: CompletionRequest) -> RenderedPrompt:
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            token_ids = self.encode(prompt, body)
        else:
            token_ids = prompt
            self._check_token_ids(token_ids)
        fitted = fit_prompt(token_ids, body, self.max_model_len)
        if not fitted:
            raise VLLMValidationError("The decoder prompt cannot be empty", parameter="prompt")
        if body.echo and (text is None or len(fitted) < len(token_ids)):
            text = self.require_tokenizer().decode(fitted)
        return RenderedPrompt(fitted, text)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        """Refuse ids that the model doesn't have, before any is decoded."""
        limit = self.model_config.get_vocab_size()
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < limit:
                raise VLLMValidationError(
                    f"Token id {token_id} is out of vocabulary", parameter="prompt", value=token_id
                )

    async def _events(
        self, answer: _Answer, results: StartedStream[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[str, None]:
        include_usage, continuous_usage = should_include_usage(
            answer.body.stream_options, self.server_config.enable_force_include_usage
        )
        choices = [_Choice() for _ in range(answer.n * len(answer.prompts))]
        try:
            async for prompt_index, result in results:
                for output in result.outputs:
                    index = prompt_index * answer.n + output.index
                    choice = self._stream_choice(answer, index, choices[index], result, output)
                    if choice is None:
                        continue
                    chunk = self._chunk(answer, [choice])
                    if continuous_usage:
                        num_prompt_tokens = len(answer.prompts[prompt_index].token_ids)
                        chunk.usage = UsageInfo.of(num_prompt_tokens, choices[index].num_tokens)
                    yield sse(chunk)
            if include_usage:
                chunk = self._chunk(answer, [])
                chunk.usage = UsageInfo.of(
                    sum(len(prompt.token_ids) for prompt in answer.prompts),
                    sum(choice.num_tokens for choice in choices),
                )
                yield sse(chunk)
        except Exception as exc:
            yield sse(create_error_response(exc))
        yield SSE_DONE

    def _chunk(
        self, answer: _Answer, choices: list[CompletionResponseStreamChoice]
    ) -> CompletionStreamResponse:
        return CompletionStreamResponse(
            id=answer.id,
            object="text_completion",
            created=answer.created,
            model=self.models.model_name,
            choices=choices,
        )

    def _stream_choice(
        self,
        answer: _Answer,
        index: int,
        choice: _Choice,
        result: RequestOutput,
        output: CompletionOutput,
    ) -> CompletionResponseStreamChoice | None:
        """What is new in one choice; None where there is nothing to tell."""
        body = answer.body
        first, choice.started = not choice.started, True
        prompt = answer.prompts[index // answer.n]
        text, token_ids, entries = _with_echo(body, prompt, result, output, echo=first)
        num_new = 0 if body.only_echo else len(output.token_ids)
        choice.num_tokens += num_new
        logprobs = None
        if body.logprobs is not None and token_ids:
            logprobs = self._logprobs(body, token_ids, entries, choice.text_offset)
            choice.text_offset += sum(map(len, logprobs.tokens))
        news = text or logprobs or output.finish_reason or (body.return_token_ids and token_ids)
        if not news:
            return None
        return CompletionResponseStreamChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=_finish_reason(body, output),
            stop_reason=None if body.only_echo else output.stop_reason,
            prompt_token_ids=prompt.token_ids if first and body.return_token_ids else None,
            token_ids=list(output.token_ids)[:num_new] if body.return_token_ids else None,
        )

    def _response(self, answer: _Answer, results: list[RequestOutput]) -> CompletionResponse:
        body = answer.body
        choices: list[CompletionResponseChoice] = []
        num_generated = 0
        for prompt, result in zip(answer.prompts, results, strict=True):
            for output in result.outputs:
                text, token_ids, entries = _with_echo(body, prompt, result, output, bool(body.echo))
                num_new = 0 if body.only_echo else len(output.token_ids)
                num_generated += num_new
                logprobs = None
                if body.logprobs is not None:
                    logprobs = self._logprobs(body, token_ids, entries)
                choices.append(
                    CompletionResponseChoice(
                        index=len(choices),
                        text=text,
                        logprobs=logprobs,
                        finish_reason=_finish_reason(body, output),
                        stop_reason=None if body.only_echo else output.stop_reason,
                        token_ids=(
                            list(output.token_ids)[:num_new] if body.return_token_ids else None
                        ),
                        prompt_logprobs=(
                            prompt_logprobs_body(result.prompt_logprobs)
                            if body.prompt_logprobs is not None
                            else None
                        ),
                        prompt_token_ids=prompt.token_ids if body.return_token_ids else None,
                    )
                )
        num_prompt = sum(len(prompt.token_ids) for prompt in answer.prompts)
        return CompletionResponse(
            id=answer.id,
            created=answer.created,
            model=self.models.model_name,
            choices=choices,
            usage=UsageInfo.of(num_prompt, num_generated),
        )

    def _logprobs(
        self,
        body: CompletionRequest,
        token_ids: Sequence[int],
        entries: Logprobs,
        text_offset: int = 0,
    ) -> CompletionLogProbs:
        """Log-probabilities of `token_ids`; `text_offset` is where the first one starts."""
        assert body.logprobs is not None
        as_id = self.show_as_ids(body)
        columns = CompletionLogProbs(text_offset=[], token_logprobs=[], tokens=[], top_logprobs=[])
        for token_id, position in zip(token_ids, entries, strict=True):
            entry = position.get(token_id) if position else None
            token = self.token_text(token_id, entry, as_id)
            columns.text_offset.append(text_offset)
            columns.tokens.append(token)
            text_offset += len(token)
            if position is None or entry is None:
                columns.token_logprobs.append(None)
                columns.top_logprobs.append(None)
                continue
            columns.token_logprobs.append(clamp_logprob(entry.logprob))
            # The sampled token comes first, then the likeliest ones.
            shown = list(position.items())[: body.logprobs + 1]
            columns.top_logprobs.append(
                {self.token_text(i, e, as_id): clamp_logprob(e.logprob) for i, e in shown}
            )
        return columns


def _finish_reason(body: CompletionRequest, output: CompletionOutput) -> str | None:
    return "length" if body.only_echo and output.finish_reason else output.finish_reason


def _with_echo(
    body: CompletionRequest,
    prompt: RenderedPrompt,
    result: RequestOutput,
    output: CompletionOutput,
    echo: bool,
) -> tuple[str, list[int], Logprobs]:
    """Text, tokens and log-probabilities of an output, behind those of its prompt with `echo`."""
    if not body.echo:
        return output.text, list(output.token_ids), output.logprobs or []
    text, token_ids = "", []
    entries: list[Mapping[int, Logprob] | None] = []
    if echo:
        assert prompt.text is not None
        text, token_ids = prompt.text, list(prompt.token_ids)
        # An abort may come before there are any.
        entries += result.prompt_logprobs or [None] * len(token_ids)
    if not body.only_echo:
        text += output.text
        token_ids += output.token_ids
        entries += output.logprobs or []
    return text, token_ids, entries
