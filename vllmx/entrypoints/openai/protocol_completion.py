# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/completion/protocol.py @ v0.25.0
"""Bodies of /v1/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vllmx.entrypoints.openai.protocol import GenerationRequest, OpenAIBaseModel, UsageInfo
from vllmx.exceptions import VLLMValidationError

DEFAULT_MAX_TOKENS = 16
"""Longest completion when neither the request nor the model's generation config says."""

Prompt = str | list[str] | list[int] | list[list[int]]


def _check_prompt(prompt: Any) -> Prompt:
    """Return a prompt of one of the four kinds, else raise VLLMValidationError saying which."""
    if prompt is None or prompt in ("", []):
        raise VLLMValidationError(
            "Either prompt or prompt_embeds must be provided and non-empty.", parameter="prompt"
        )
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list):
        kinds = set(map(type, prompt))
        if kinds in ({str}, {int}):
            return prompt
        if kinds == {list} and all(set(map(type, item)) <= {int} for item in prompt):
            return prompt
    raise VLLMValidationError(
        "`prompt` must be a string, a list of strings, a list of token ids, or a list of lists "
        "of token ids.",
        parameter="prompt",
    )


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Any = None
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None

    @model_validator(mode="after")
    def check_prompt(self) -> CompletionRequest:
        """Check the prompt's kind and what can't be combined with it."""
        if self.prompt_embeds is not None:
            raise VLLMValidationError(
                "`prompt_embeds`: prompts as embeddings are not built yet; send `prompt`.",
                parameter="prompt_embeds",
            )
        if self.logprobs is not None and self.logprobs < 0:
            raise VLLMValidationError("`logprobs` must be a positive value.", parameter="logprobs")
        if self.suffix is not None:
            raise VLLMValidationError("suffix is not currently supported", parameter="suffix")
        self.prompt = _check_prompt(self.prompt)
        return self

    @property
    def only_echo(self) -> bool:
        """Whether the prompt alone is asked for, to score it: nothing generated is returned."""
        return bool(self.echo) and self.max_tokens == 0

    def get_max_tokens(self) -> int | None:
        """Output tokens that the request asks for, if it says; one is drawn for `only_echo`."""
        return 1 if self.only_echo else self.max_tokens

    def get_logprobs(self) -> int | None:
        """Log-probabilities for each output token, None for none."""
        return self.logprobs

    def get_prompt_logprobs(self) -> int | None:
        """Log-probabilities for each prompt token; echo shows as many as for the output."""
        if self.prompt_logprobs is None and self.echo:
            return self.logprobs
        return self.prompt_logprobs


class CompletionLogProbs(OpenAIBaseModel):
    """Log-probabilities of a text, column by column; `text_offset` counts characters."""

    text_offset: list[int] = Field(default_factory=list)
    token_logprobs: list[float | None] = Field(default_factory=list)
    tokens: list[str] = Field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = Field(default_factory=list)


class CompletionResponseChoice(OpenAIBaseModel):
    """One completion; choice `prompt * n + i` is sample i of that prompt."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(OpenAIBaseModel):
    """Body of a completion that is not streamed."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo


class CompletionResponseStreamChoice(OpenAIBaseModel):
    """New text of one completion."""

    index: int
    text: str
    logprobs: CompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class CompletionStreamResponse(OpenAIBaseModel):
    """A chunk of a streamed completion."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionResponseStreamChoice]
    usage: UsageInfo | None = None
