# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/openai/engine/protocol.py @ v0.25.0
"""Bodies of the OpenAI-compatible API: what completions and chats have in common.

Unknown fields are let in, as OpenAI clients expect, and named in one warning a request. Fields
for what vllmx doesn't do yet are known, so that they can be refused by name.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo, model_validator

from vllmx.entrypoints.openai.base_model import OpenAIBaseModel
from vllmx.entrypoints.openai.response_format import (
    ResponseFormat,
    refuse_older_names,
    structured_outputs_of,
)
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
Int64 = Annotated[int, Field(ge=INT64_MIN, le=INT64_MAX)]


def _check_num_logprobs(count: int, info: ValidationInfo) -> int:
    if count < -1:
        raise VLLMValidationError(
            f"`{info.field_name}` must be a positive value or -1.", parameter=info.field_name
        )
    return count


NumLogprobs = Annotated[int, AfterValidator(_check_num_logprobs)]

NEUTRAL_SAMPLING_PARAMS = {
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
}


def random_uuid() -> str:
    """32 hexadecimal digits."""
    return uuid.uuid4().hex


def now() -> int:
    """Seconds since the epoch."""
    return int(time.time())


# --- errors, models, usage -----------------------------------------------------------------------


class ErrorInfo(OpenAIBaseModel):
    """What went wrong, in OpenAI's shape; `code` is the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: int


class ErrorResponse(OpenAIBaseModel):
    """Body of every answer that is not a success."""

    error: ErrorInfo


class ModelPermission(OpenAIBaseModel):
    """Part of a model card that old clients expect."""

    id: str = Field(default_factory=lambda: f"modelperm-{random_uuid()}")
    object: str = "model_permission"
    created: int = Field(default_factory=now)
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(OpenAIBaseModel):
    """One model of /v1/models; `max_model_len` is in tokens."""

    id: str
    object: str = "model"
    created: int = Field(default_factory=now)
    owned_by: str = "vllmx"
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    permission: list[ModelPermission] = Field(default_factory=list)


class ModelList(OpenAIBaseModel):
    """Body of /v1/models."""

    object: str = "list"
    data: list[ModelCard] = Field(default_factory=list)


class UsageInfo(OpenAIBaseModel):
    """Tokens of a request: each prompt once, every choice's output."""

    prompt_tokens: int = 0
    total_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: dict[str, int] | None = None

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> UsageInfo:
        """Usage with the total filled in."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


class StreamOptions(OpenAIBaseModel):
    """What a stream carries besides text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


# --- requests ------------------------------------------------------------------------------------


class GenerationRequest(OpenAIBaseModel):
    """What completions and chat completions have in common: sampling, streaming, output form."""

    model: str | None = None
    frequency_penalty: float | None = 0.0
    logit_bias: dict[str, float] | None = None
    max_tokens: Int64 | None = None
    n: Int64 | None = 1
    presence_penalty: float | None = 0.0
    response_format: ResponseFormat | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    use_beam_search: bool = False
    top_k: Int64 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    length_penalty: float = 1.0
    stop_token_ids: list[Int64] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Int64 = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT64_MAX)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    allowed_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: NumLogprobs | None = None

    add_special_tokens: bool = True
    structured_outputs: dict[str, Any] | None = None
    priority: Int64 = 0
    request_id: str = Field(default_factory=random_uuid)
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(default=None, min_length=1)
    vllm_xargs: dict[str, Any] | None = None
    thinking_token_budget: Int64 | None = None
    repetition_detection: RepetitionDetectionParams | None = None

    @model_validator(mode="after")
    def check_common(self) -> GenerationRequest:
        """Refuse combinations that have no meaning and features that are not there."""
        if self.stream_options is not None and not self.stream:
            raise VLLMValidationError(
                "Stream options can only be defined when `stream=True`.",
                parameter="stream_options",
            )
        if self.stream and self.prompt_logprobs:
            raise VLLMValidationError(
                "`prompt_logprobs` are not available when `stream=True`.",
                parameter="prompt_logprobs",
            )
        if self.use_beam_search:
            self._check_beam_search()
        refuse_older_names(self.model_extra or {})
        self.get_structured_outputs()
        return self

    def get_structured_outputs(self) -> StructuredOutputsParams | None:
        """The constraint of the answer; raises VLLMValidationError for one that is none."""
        return structured_outputs_of(self.response_format, self.structured_outputs)

    def _check_beam_search(self) -> None:
        if self.stream:
            raise VLLMValidationError(
                "Streaming is not currently supported with beam search", parameter="stream"
            )
        if self.get_prompt_logprobs() is not None:
            raise VLLMValidationError(
                "`prompt_logprobs` (and `echo` with `logprobs`) are not available with beam "
                "search; leave one of them out.",
                parameter="prompt_logprobs",
            )
        if self.get_structured_outputs() is not None:
            raise VLLMValidationError(
                "`structured_outputs` and `response_format` are not available with beam search "
                "over HTTP; leave one of them out, or call LLM.beam_search.",
                parameter="structured_outputs",
            )

    @property
    def max_tokens_name(self) -> str:
        """Which field holds the output length, for error messages."""
        return "max_tokens"

    def get_max_tokens(self) -> int | None:
        """Output tokens that the request asks for, if it says."""
        return self.max_tokens

    @abstractmethod
    def get_logprobs(self) -> int | None:
        """Log-probabilities for each output token, None for none."""

    def get_prompt_logprobs(self) -> int | None:
        """Log-probabilities for each prompt token, None for none."""
        return self.prompt_logprobs

    def to_beam_search_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any] | None = None
    ) -> BeamSearchParams:
        """Parameters of a beam search as wide as `n`. Raises VLLMValidationError."""
        temperature = self.temperature
        if temperature is None:
            temperature = (default_sampling_params or {}).get("temperature", 1.0)
        beam_width = 1 if self.n is None else self.n
        for name, value in (("n", beam_width), (self.max_tokens_name, max_tokens)):
            if value < 1:
                raise VLLMValidationError(
                    f"{name} must be at least 1 with beam search, got {value}.",
                    parameter=name,
                    value=value,
                )
        return BeamSearchParams(
            beam_width=beam_width,
            max_tokens=max_tokens,
            ignore_eos=self.ignore_eos,
            temperature=temperature,
            length_penalty=self.length_penalty,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def to_sampling_params(
        self, max_tokens: int, default_sampling_params: dict[str, Any] | None = None
    ) -> SamplingParams:
        """Sampling parameters; what the request leaves open comes from the model's defaults.

        Raises VLLMValidationError for a value out of range.
        """
        defaults = default_sampling_params or {}
        chosen = {}
        for name, neutral in NEUTRAL_SAMPLING_PARAMS.items():
            value = getattr(self, name)
            chosen[name] = defaults.get(name, neutral) if value is None else value
        stop_token_ids = [*(self.stop_token_ids or ()), *(defaults.get("stop_token_ids") or ())]
        return SamplingParams.from_optional(
            n=self.n,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=list(dict.fromkeys(stop_token_ids)),
            bad_words=self.bad_words,
            include_stop_str_in_output=self.include_stop_str_in_output,
            ignore_eos=self.ignore_eos,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.get_logprobs(),
            prompt_logprobs=self.get_prompt_logprobs(),
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            output_kind=RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY,
            logit_bias=self.logit_bias,
            allowed_token_ids=self.allowed_token_ids,
            structured_outputs=self.get_structured_outputs(),
            extra_args=self.vllm_xargs or None,
            thinking_token_budget=self.thinking_token_budget,
            repetition_detection=self.repetition_detection,
            **chosen,
        )
