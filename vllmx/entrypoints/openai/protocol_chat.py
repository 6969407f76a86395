# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/chat_completion/protocol.py @ v0.25.0
"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from vllmx.entrypoints.openai.protocol import (
    GenerationRequest,
    Int64,
    NumLogprobs,
    OpenAIBaseModel,
    UsageInfo,
)
from vllmx.exceptions import VLLMValidationError


class ChatMessageParam(OpenAIBaseModel):
    """One message of a conversation; parts of a list content are checked when rendered."""

    role: str
    content: str | list[str | dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    audio: Any = None
    function_call: Any = None

    def to_dict(self) -> dict[str, Any]:
        """The message as it was sent, for the chat template."""
        message = self.model_dump(exclude_unset=True)
        reasoning = message.pop("reasoning_content", None)
        if reasoning is not None and message.get("reasoning") is None:
            message["reasoning"] = reasoning
        return message


class FunctionDefinition(OpenAIBaseModel):
    """A function that a chat template may describe to the model."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatCompletionToolsParam(OpenAIBaseModel):
    """A tool of a chat request."""

    type: Literal["function"] = "function"
    function: FunctionDefinition

    def to_dict(self) -> dict[str, Any]:
        """The tool for the chat template; `strict` only where it was given."""
        tool = self.model_dump()
        if self.function.strict is None:
            del tool["function"]["strict"]
        return tool


class ConversationFields(OpenAIBaseModel):
    """What a chat template needs, in chat and in tokenize requests."""

    messages: list[ChatMessageParam] = Field(min_length=1)
    tools: list[ChatCompletionToolsParam] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_conversation(self) -> ConversationFields:
        """Refuse a template from outside, and to end and continue the last message at once.

        To continue the last message turns the generation prompt off unless both are asked for.
        """
        kwargs = self.chat_template_kwargs or {}
        if self.chat_template is not None or kwargs.get("chat_template") is not None:
            raise VLLMValidationError(
                "Refused request with untrusted chat template: set model.chat_template (flag "
                "--chat-template) when the server starts instead.",
                parameter="chat_template",
            )
        if self.continue_final_message and self.add_generation_prompt:
            if "add_generation_prompt" in self.model_fields_set:
                raise VLLMValidationError(
                    "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                    parameter="continue_final_message",
                )
            self.add_generation_prompt = False
        return self


class ChatCompletionRequest(ConversationFields, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    logprobs: bool | None = False
    top_logprobs: NumLogprobs | None = 0
    max_completion_tokens: Int64 | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    include_reasoning: bool = True
    echo: bool = False
    add_special_tokens: bool = False
    documents: list[dict[str, str]] | None = None
    return_prompt_text: bool | None = None

    @model_validator(mode="after")
    def check_chat(self) -> ChatCompletionRequest:
        """Refuse combinations that have no meaning and features that are not there."""
        if self.top_logprobs and not self.logprobs:
            raise VLLMValidationError(
                "when using `top_logprobs`, `logprobs` must be set to true.",
                parameter="top_logprobs",
            )
        if self.tools == []:
            raise VLLMValidationError(
                "`tools` must not be an empty array. "
                "Either provide at least one tool or omit the field entirely.",
                parameter="tools",
            )
        if self.tool_choice not in (None, "none") and not self.tools:
            raise VLLMValidationError(
                "When using `tool_choice`, `tools` must be set.", parameter="tool_choice"
            )
        if self.tools and self.tool_choice != "none":
            raise VLLMValidationError(
                "`tools`: tool calling is not built yet; leave `tools` out or send "
                '`tool_choice="none"`.',
                parameter="tools",
            )
        return self

    @property
    def max_tokens_name(self) -> str:
        """Which of the two fields holds the output length."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def get_max_tokens(self) -> int | None:
        """Output tokens that the request asks for, if it says."""
        return getattr(self, self.max_tokens_name)

    def get_logprobs(self) -> int | None:
        """Log-probabilities for each output token, None for none."""
        return (self.top_logprobs or 0) if self.logprobs else None


class ChatMessage(OpenAIBaseModel):
    """The answer to a chat."""

    role: str
    content: str | None = None
    refusal: str | None = None
    reasoning: str | None = None


class DeltaMessage(OpenAIBaseModel):
    """What is new in a streamed answer; only what was set is sent."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None


class ChatCompletionLogProb(OpenAIBaseModel):
    """A token with its log-probability; `bytes` is its UTF-8."""

    token: str
    logprob: float = -9999.0
    bytes: list[int] | None = None


class ChatCompletionLogProbsContent(ChatCompletionLogProb):
    """A sampled token and the likeliest ones at its place."""

    top_logprobs: list[ChatCompletionLogProb] = Field(default_factory=list)


class ChatCompletionLogProbs(OpenAIBaseModel):
    """Log-probabilities of an answer, token by token."""

    content: list[ChatCompletionLogProbsContent] | None = None


class ChatCompletionResponseChoice(OpenAIBaseModel):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = "stop"
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionResponse(OpenAIBaseModel):
    """Body of a chat completion that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatCompletionResponseChoice]
    service_tier: str | None = None
    system_fingerprint: str | None = None
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None


class ChatCompletionResponseStreamChoice(OpenAIBaseModel):
    """What is new in one answer."""

    index: int
    delta: DeltaMessage
    logprobs: ChatCompletionLogProbs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatCompletionStreamResponse(OpenAIBaseModel):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatCompletionResponseStreamChoice]
    usage: UsageInfo | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
