# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/generate/base/serving.py,
#   vllm/entrypoints/serve/utils/api_utils.py, vllm/renderers/params.py @ v0.25.0
"""What the handlers of completions and chats share, from the body to the engine and back."""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi import Request

from vllmx.config import ServerConfig
from vllmx.entrypoints.beam_search import BeamSearchInstance, beam_search
from vllmx.entrypoints.openai.errors import GenerationError
from vllmx.entrypoints.openai.protocol import (
    GenerationRequest,
    OpenAIBaseModel,
    StreamOptions,
    random_uuid,
)
from vllmx.entrypoints.openai.serving_models import OpenAIServingModels
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from vllmx.engine.async_llm import AsyncLLM
    from vllmx.logprobs import Logprob
    from vllmx.model_loader.tokenizer import Tokenizer
    from vllmx.outputs import RequestOutput

logger = logging.getLogger(__name__)

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON can't say."""

_UNKNOWN_FIELDS_SHOWN = 20


@dataclass
class RenderedPrompt:
    """A prompt as the engine takes it, with its text where that is known or needed."""

    token_ids: list[int]
    text: str | None = None
    reasoning_ended: bool | None = None
    """Whether a grammar begins at once; None: the engine finds out where."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """What the engine's reasoning parser is made with."""


def fit_prompt(token_ids: list[int], request: GenerationRequest, max_model_len: int) -> list[int]:
    """Cut the prompt as the request wants and check that it leaves room for the output.

    Raises VLLMValidationError naming the lengths. At least one token of output must fit.
    """
    max_tokens = request.get_max_tokens() or 0
    name = request.max_tokens_name
    if max_tokens > max_model_len:
        raise VLLMValidationError(
            f"{name}={max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            parameter=name,
            value=max_tokens,
        )
    max_input = max_model_len - max(max_tokens, 0)
    limit = request.truncate_prompt_tokens
    if limit is not None:
        if limit > max_input:
            raise VLLMValidationError(
                f"truncate_prompt_tokens={limit} cannot be greater than max_model_len - "
                f"{name} = {max_input}. Please request a smaller truncation size.",
                parameter="truncate_prompt_tokens",
                value=limit,
            )
        limit = max_input if limit < 0 else limit
        if limit < len(token_ids):
            keep_first = request.truncation_side == "right"
            token_ids = token_ids[:limit] if keep_first else token_ids[len(token_ids) - limit :]
    num_tokens = len(token_ids)
    if num_tokens > min(max_input, max_model_len - 1):
        raise VLLMValidationError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {max_tokens} output tokens and your prompt contains {num_tokens} input "
            f"tokens, for a total of {num_tokens + max_tokens} tokens. Please reduce the length "
            "of the input prompt or the number of requested output tokens.",
            parameter="input_tokens",
            value=num_tokens,
        )
    return token_ids


def get_max_tokens(
    max_model_len: int,
    max_tokens: int | None,
    input_length: int,
    default_max_tokens: int | None,
    override_max_tokens: int | None = None,
) -> int:
    """Output tokens to allow: what was asked for, else the default, within what fits."""
    wanted = max_tokens if max_tokens is not None else default_max_tokens
    limits = (max_model_len - input_length, wanted, override_max_tokens)
    return min(limit for limit in limits if limit is not None)


def should_include_usage(options: StreamOptions | None, force: bool) -> tuple[bool, bool]:
    """Whether a stream ends with its usage, and whether every chunk carries it."""
    if force:
        return True, True
    if options is None or not options.include_usage:
        return False, False
    return True, bool(options.continuous_usage_stats)


def clamp_logprob(logprob: float) -> float:
    """`logprob` as a number that JSON has: minus infinity and NaN are LOWEST_LOGPROB."""
    if math.isnan(logprob):
        return LOWEST_LOGPROB
    return min(max(logprob, LOWEST_LOGPROB), -LOWEST_LOGPROB)


def prompt_logprobs_body(
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None,
) -> list[dict[str, Any] | None] | None:
    """Prompt log-probabilities as the API shows them: an object a position, keyed by token id."""
    if prompt_logprobs is None:
        return None
    return [_position_body(position) if position else None for position in prompt_logprobs]


def _position_body(position: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token_id): {
            "logprob": clamp_logprob(entry.logprob),
            "rank": entry.rank,
            "decoded_token": entry.decoded_token,
        }
        for token_id, entry in position.items()
    }


def warn_unknown_fields(body: OpenAIBaseModel) -> None:
    """Log one warning that names the fields of `body` that nobody reads, if there are any."""
    unknown = [name if name.isprintable() else repr(name) for name in body.unknown_fields()]
    if unknown:
        names = ", ".join(unknown[:_UNKNOWN_FIELDS_SHOWN])
        logger.warning("The request has unknown fields, which are ignored: %s", names)


class OpenAIServing:
    """Base of the handlers: checks, defaults, the way to the engine, tokens as text."""

    def __init__(
        self,
        engine_client: AsyncLLM,
        models: OpenAIServingModels,
        server_config: ServerConfig,
        active_requests: set[str],
    ) -> None:
        self.engine_client = engine_client
        self.models = models
        self.server_config = server_config
        self.active_requests = active_requests
        self.model_config = engine_client.vllm_config.model_config
        self.tokenizer: Tokenizer | None = engine_client.get_tokenizer()
        self.default_sampling_params = self.model_config.get_diff_sampling_param()
        if self.model_config.generation_config in ("auto", "vllm"):
            overrides = self.model_config.override_generation_config
            self.override_max_tokens = overrides.get("max_new_tokens")
        else:
            self.override_max_tokens = self.default_sampling_params.get("max_tokens")

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        max_model_len = self.model_config.max_model_len
        assert max_model_len is not None
        return max_model_len

    def check_request(self, body: GenerationRequest) -> None:
        """Raise for an unknown model (404) or a dead engine (503); warn of unknown fields."""
        self.models.check_model(body.model)
        if self.engine_client.errored:
            raise self.engine_client.dead_error
        warn_unknown_fields(body)

    def require_tokenizer(self) -> Tokenizer:
        """The tokenizer; raises VLLMValidationError where the engine runs without one."""
        if self.tokenizer is None:
            raise VLLMValidationError(
                "Unable to get tokenizer because `skip_tokenizer_init=True`: send token ids and "
                "don't ask for text.",
                parameter="skip_tokenizer_init",
                value=True,
            )
        return self.tokenizer

    def encode(self, text: str, body: GenerationRequest) -> list[int]:
        """Token ids of a prompt's text; a text that cannot fit is refused before it is encoded."""
        tokenizer = self.require_tokenizer()
        if body.truncate_prompt_tokens is None:
            self.engine_client.input_processor.check_text_length(text)
        return tokenizer.encode(text, body.add_special_tokens)

    def request_id(self, prefix: str, body: GenerationRequest, raw_request: Request) -> str:
        """Id of the answer: from the header X-Request-Id, the body, or random."""
        given = raw_request.headers.get("X-Request-Id") or body.request_id or random_uuid()
        return f"{prefix}-{given}"

    def sampling_params(
        self, body: GenerationRequest, prompt: RenderedPrompt, default_max_tokens: int | None
    ) -> SamplingParams | BeamSearchParams:
        """Parameters for one prompt, of the search if one is asked for; VLLMValidationError."""
        max_tokens = get_max_tokens(
            self.max_model_len,
            body.get_max_tokens(),
            len(prompt.token_ids),
            default_max_tokens,
            self.override_max_tokens,
        )
        if body.use_beam_search:
            beams = body.to_beam_search_params(max_tokens, self.default_sampling_params)
            beams.verify(self.model_config, "n")
            return beams
        return body.to_sampling_params(max_tokens, self.default_sampling_params)

    def run(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams | BeamSearchParams,
        request_id: str,
        body: GenerationRequest,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one prompt, by sampling or by beam search; closing the generator aborts it."""
        if isinstance(params, SamplingParams):
            return self.generate(prompt, params, request_id, body)

        def generate(
            token_ids: list[int], step: SamplingParams, step_id: str
        ) -> AsyncGenerator[RequestOutput, None]:
            return self.generate(RenderedPrompt(token_ids, None), step, step_id, body)

        instance = BeamSearchInstance(
            prompt,
            prompt.token_ids,
            params,
            frozenset(self.engine_client.input_processor.end_token_ids),
            self.max_model_len,
            prune_by_logprob=True,
        )
        tokenizer = self.require_tokenizer()
        return beam_search(instance, request_id, tokenizer, generate, prompt.text)

    async def generate(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        request_id: str,
        body: GenerationRequest,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Run one prompt in the engine; closing the generator aborts it."""
        request_id += f"-{random_uuid()[:8]}"  # a client may send the same id twice
        inputs: dict[str, Any] = {"prompt_token_ids": prompt.token_ids}
        if prompt.text is not None:
            inputs["prompt"] = prompt.text
        if body.cache_salt is not None:
            inputs["cache_salt"] = body.cache_salt
        outputs = self.engine_client.generate(
            inputs,
            params,
            request_id,
            priority=body.priority,
            reasoning_ended=prompt.reasoning_ended,
            reasoning_parser_kwargs=prompt.reasoning_parser_kwargs,
        )
        self.active_requests.add(request_id)
        try:
            async for output in outputs:
                for choice in output.outputs:
                    if choice.finish_reason == "error":
                        if isinstance(choice.stop_reason, str):
                            raise VLLMValidationError(
                                choice.stop_reason, parameter="structured_outputs"
                            )
                        logger.error("Request %s failed inside the engine", request_id)
                        raise GenerationError
                yield output
        finally:
            self.active_requests.discard(request_id)
            await outputs.aclose()

    def show_as_ids(self, body: GenerationRequest) -> bool:
        """Whether tokens are shown as `token_id:N` instead of their text."""
        if body.return_tokens_as_token_ids is None:
            return self.server_config.return_tokens_as_token_ids
        return body.return_tokens_as_token_ids

    def token_text(self, token_id: int, entry: Logprob | None, as_id: bool) -> str:
        """How a token is shown; `entry` holds its text where the engine decoded it in place."""
        if as_id:
            return f"token_id:{token_id}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        return self.require_tokenizer().decode([token_id])
