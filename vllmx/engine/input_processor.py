# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/input_processor.py @ v0.25.0
"""From what a caller asks to a request for the engine core: tokenized, checked, complete.

Whatever is wrong with a request is said here, as a ValueError; what passes cannot hurt the engine.
"""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllmx.engine import EngineCoreRequest
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.model_loader.tokenizer import Tokenizer

PromptType = str | list[int] | dict[str, Any]
"""Text, token ids, or a dict with "prompt" or "prompt_token_ids" and perhaps "cache_salt"."""

LOGITSPROCS_GROUP = "vllm.logits_processors"
"""Entry point group of packages that bring logits processors."""
_TOKENIZATION_KWARGS = ("add_special_tokens", "truncate_prompt_tokens", "truncation_side")


class InputProcessor:
    """Makes `EngineCoreRequest`s."""

    def __init__(self, vllm_config: VllmConfig, tokenizer: Tokenizer | None = None) -> None:
        """`tokenizer` None: prompts must be token ids."""
        self.vllm_config = vllm_config
        self.model_config = vllm_config.model_config
        self.tokenizer = tokenizer
        self.generation_config_fields = self._end_tokens()
        eos_token_id = None if tokenizer is None else tokenizer.eos_token_id
        self.eos_token_id = eos_token_id if self._known([eos_token_id]) else None
        self._last_params: tuple[SamplingParams, SamplingParams] | None = None

    def _end_tokens(self) -> dict[str, Any]:
        """The generation config, its eos_token_id completed from tokenizer and config.json."""
        fields = dict(getattr(self.model_config, "generation_config_dict", None) or {})
        eos_ids = fields.get("eos_token_id")
        for config in (self.model_config.hf_config, self.model_config.hf_text_config):
            if eos_ids is None:
                eos_ids = getattr(config, "eos_token_id", None)
        eos_ids = {eos_ids} if isinstance(eos_ids, int) else set(eos_ids or ())
        if self.tokenizer is not None:
            eos_ids |= set(self.tokenizer.extra_eos_token_ids)
        fields["eos_token_id"] = sorted(self._known(eos_ids))
        return fields

    def _known(self, token_ids: Iterable[Any]) -> list[int]:
        """Those of a file's token ids that the model has a row for; the others can't come up."""
        vocab_size = self.model_config.get_vocab_size()
        return [i for i in token_ids if isinstance(i, int) and 0 <= i < vocab_size]

    @property
    def end_token_ids(self) -> set[int]:
        """Every token with which the model ends an answer."""
        ids = set(self.generation_config_fields["eos_token_id"])
        return ids if self.eos_token_id is None else ids | {self.eos_token_id}

    @property
    def _max_model_len(self) -> int:
        # Read anew each time: the engine lowers it where the KV cache is small.
        max_model_len = self.model_config.max_model_len
        assert max_model_len is not None
        return max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer; ValueError where there is none."""
        if self.tokenizer is None:
            raise ValueError("Tokenizer not available when `skip_tokenizer_init=True`")
        return self.tokenizer

    @staticmethod
    def assign_request_id(request: EngineCoreRequest) -> None:
        """Keep the caller's id as external_req_id and make request_id unique."""
        if request.external_req_id is not None:
            raise ValueError(
                "The external_req_id field should not be set on EngineCoreRequests"
                " passed to vLLM; use the request_id field."
            )
        request.external_req_id = request.request_id
        request.request_id = f"{request.external_req_id}-{uuid.uuid4().hex[:8]}"

    def process_inputs(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: Any | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> EngineCoreRequest:
        """Tokenize and check one request; `params` is copied and completed.

        tokenization_kwargs: add_special_tokens, truncate_prompt_tokens (keep so many tokens; -1:
        as many as fit), truncation_side ("left" by default: the end is kept). Raises ValueError.
        """
        sampling_params = self._completed(params)
        if lora_request is not None and self.vllm_config.lora_config is None:
            raise VLLMValidationError(
                f"Got lora_request {lora_request} but LoRA is not enabled! No model of vllmx can "
                "apply adapters yet; leave lora_request out.",
                parameter="lora_request",
            )
        num_ranks = self.vllm_config.parallel_config.data_parallel_size
        if data_parallel_rank is not None and not 0 <= data_parallel_rank < num_ranks:
            raise VLLMValidationError(
                f"data_parallel_rank {data_parallel_rank} is out of range [0, {num_ranks}).",
                parameter="data_parallel_rank",
            )
        prompt_token_ids = self._tokenize(prompt, params, dict(tokenization_kwargs or {}))
        self._validate_prompt(prompt_token_ids)
        if sampling_params.max_tokens is None:
            sampling_params.max_tokens = self._max_model_len - len(prompt_token_ids)
            sampling_params.min_tokens = min(sampling_params.min_tokens, sampling_params.max_tokens)
        if sampling_params.structured_outputs is not None:
            self.validate_structured_outputs(sampling_params)
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt_token_ids,
            mm_features=None,
            sampling_params=sampling_params,
            pooling_params=None,
            arrival_time=time.time() if arrival_time is None else arrival_time,
            lora_request=lora_request,
            cache_salt=_cache_salt(prompt),
            data_parallel_rank=data_parallel_rank,
            priority=priority,
            trace_headers=trace_headers,
        )

    def _completed(self, params: SamplingParams) -> SamplingParams:
        """A checked copy, with what generation config and tokenizer add.

        The last one is kept: of many requests with equal parameters each but the first takes
        7 us for them instead of 110.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params must be SamplingParams, but got {type(params).__name__}")
        last = None if params.skip_clone else self._last_params
        if last is not None and params == last[0]:
            return last[1].clone()
        self._validate_params(params)
        completed = params.clone()
        if not params.skip_clone:
            completed.verify_own()
        asked = completed.clone()
        completed.update_from_generation_config(self.generation_config_fields, self.eos_token_id)
        vocab_size = self.model_config.get_vocab_size()
        if self.tokenizer is not None:
            completed.update_from_tokenizer(self.tokenizer, vocab_size)
        elif completed.bad_words:
            raise VLLMValidationError(
                "bad_words needs a tokenizer, so it can't be used with `skip_tokenizer_init=True`.",
                parameter="bad_words",
            )
        completed.verify_some_token_left(vocab_size)
        if not params.skip_clone:  # what is shared with the caller can change
            self._last_params = (asked, completed.clone())
        return completed

    def validate_structured_outputs(self, params: SamplingParams) -> None:
        """Choose who enforces the constraint of `params`, which is marked with it.

        VLLMValidationError where nobody can. What was asked before is known; the first time takes
        longer, as libraries are loaded, so that a server does it in a thread.
        """
        from vllmx.structured_output.validation import validate_structured_outputs

        config = self.vllm_config.structured_outputs_config
        validate_structured_outputs(params, self.model_config, config, self.tokenizer)

    def _validate_params(self, params: SamplingParams) -> None:
        params.verify(
            self.model_config,
            self.vllm_config.speculative_config,
            self.vllm_config.structured_outputs_config,
            self.tokenizer,
        )
        reasoning = self.vllm_config.reasoning_config
        if params.thinking_token_budget is not None and not (reasoning and reasoning.enabled):
            raise VLLMValidationError(
                "thinking_token_budget is set but reasoning_config is not configured. "
                "Please set --reasoning-parser and/or --reasoning-config to use "
                "thinking_token_budget.",
                parameter="thinking_token_budget",
                value=params.thinking_token_budget,
            )
        self._validate_for_processors(params)
        if params.stop and self.tokenizer is None:
            raise VLLMValidationError(
                "stop strings need a tokenizer, so they can't be used with "
                "`skip_tokenizer_init=True`; use stop_token_ids.",
                parameter="stop",
                value=params.stop,
            )

    def _validate_for_processors(self, params: SamplingParams) -> None:
        """Let custom logits processors check the parameters, where there are any."""
        if self._has_processors:
            from vllmx.sample.logits_processor import validate_logits_processors_parameters

            validate_logits_processors_parameters(self.model_config.logits_processors, params)

    @cached_property
    def _has_processors(self) -> bool:
        # Without any, the front end of another process never loads torch for their sake.
        return bool(self.model_config.logits_processors or entry_points(group=LOGITSPROCS_GROUP))

    def _tokenize(
        self, prompt: PromptType, params: SamplingParams, kwargs: dict[str, Any]
    ) -> list[int]:
        unknown = sorted(set(kwargs).difference(_TOKENIZATION_KWARGS))
        if unknown:
            raise VLLMValidationError(
                f"Unknown tokenization arguments {', '.join(unknown)}; "
                f"there are {', '.join(_TOKENIZATION_KWARGS)}.",
                parameter=unknown[0],
            )
        text_or_ids = _text_or_ids(prompt)
        if isinstance(text_or_ids, str):
            tokenizer = self.get_tokenizer()
            if kwargs.get("truncate_prompt_tokens") is None:
                self.check_text_length(text_or_ids)
            token_ids = tokenizer.encode(text_or_ids, kwargs.get("add_special_tokens", True))
        else:
            token_ids = _as_token_ids(text_or_ids)
        return self._truncate(
            token_ids,
            kwargs.get("truncate_prompt_tokens"),
            kwargs.get("truncation_side", "left"),
            params.max_tokens or 1,
        )

    def _truncate(
        self, token_ids: list[int], length: int | None, side: str, max_tokens: int
    ) -> list[int]:
        if side not in ("left", "right"):
            raise VLLMValidationError(
                "`truncation_side` must be either 'left' or 'right'.",
                parameter="truncation_side",
                value=side,
            )
        if length is None:
            return token_ids
        room = self._max_model_len - max_tokens
        if length == -1:
            length = max(room, 1)
        if not 1 <= length < self._max_model_len:
            raise VLLMValidationError(
                f"truncate_prompt_tokens={length} must be -1 or between 1 and "
                f"{self._max_model_len - 1}.",
                parameter="truncate_prompt_tokens",
                value=length,
            )
        return token_ids[-length:] if side == "left" else token_ids[:length]

    @cached_property
    def _max_chars_per_token(self) -> int:
        return max(map(len, self.get_tokenizer().backend.get_vocab()), default=1)

    def check_text_length(self, text: str) -> None:
        """Refuse a text that cannot fit before it is tokenized, which takes long for megabytes."""
        limit = self._max_model_len
        if len(text) <= limit * 8 or len(text) <= limit * self._max_chars_per_token:
            return
        raise VLLMValidationError(
            f"This model's maximum context length is {limit} tokens. However, your prompt "
            f"contains {len(text)} characters (more than {limit * self._max_chars_per_token} "
            f"characters, which is the upper bound for {limit} input tokens). "
            f"Please reduce the length of the input prompt.",
            parameter="input_text",
            value=len(text),
        )

    def _validate_prompt(self, prompt_token_ids: list[int]) -> None:
        num_tokens, limit = len(prompt_token_ids), self._max_model_len
        if num_tokens == 0:
            raise ValueError("The decoder prompt cannot be empty")
        # Not the tokenizer's highest id, which may be above what the model has a row for.
        vocab_size = self.model_config.get_vocab_size()
        for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"Token id {token_id} is out of vocabulary")
        if num_tokens > limit:
            raise ValueError(
                f"The decoder prompt (length {num_tokens}) is "
                f"longer than the maximum model length of {limit}. "
                "Make sure that `max_model_len` is no smaller than the number of text tokens."
            )
        if num_tokens == limit:
            raise ValueError(
                f"The decoder prompt (length {num_tokens}) plus the number of "
                f"requested output tokens (at least 1) is longer than the maximum "
                f"model length of {limit}. Make sure that `max_model_len` is no smaller than the "
                "number of text tokens (prompt + requested output tokens)."
            )


def prompt_text(prompt: PromptType) -> str | None:
    """The text of `prompt`, None where it is token ids alone."""
    return prompt if isinstance(prompt, str) else _field(prompt, "prompt")


def _field(prompt: PromptType, name: str) -> Any:
    return prompt.get(name) if isinstance(prompt, dict) else None


def _text_or_ids(prompt: PromptType) -> str | Sequence[int]:
    found: Any = prompt
    if isinstance(prompt, dict):
        _refuse_what_no_model_takes(prompt)
        found = prompt.get("prompt_token_ids")
        if found is None:
            found = prompt.get("prompt")
        if found is None:
            raise VLLMValidationError(
                'A prompt given as a dict needs "prompt" or "prompt_token_ids", '
                f"got the keys {', '.join(map(repr, prompt)) or 'none'}.",
                parameter="prompt",
            )
    if isinstance(found, str):
        return found
    if isinstance(found, (bytes, dict)) or not hasattr(found, "__iter__"):
        raise VLLMValidationError(
            f"A prompt must be a string or a list of token ids, got {type(found).__name__}.",
            parameter="prompt",
        )
    return found


def _refuse_what_no_model_takes(prompt: dict[str, Any]) -> None:
    for key in ("multi_modal_data", "prompt_embeds", "encoder_prompt"):
        value = prompt.get(key)
        if value is not None and not (isinstance(value, dict) and not value):
            raise VLLMValidationError(
                f"{key}: no model of vllmx takes more than text; leave it out.", parameter=key
            )


def _as_token_ids(token_ids: Sequence[Any]) -> list[int]:
    ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
    if set(map(type, ids)) <= {int}:
        return ids
    for i, token_id in enumerate(ids):
        try:
            ids[i] = operator.index(token_id)  # integers of other libraries
        except TypeError:
            ids[i] = None
        if ids[i] is None or isinstance(token_id, bool):
            raise VLLMValidationError(
                f"Token id {token_id!r} is out of vocabulary: token ids are integers.",
                parameter="prompt_token_ids",
                value=token_id,
            )
    return ids


def _cache_salt(prompt: PromptType) -> str | None:
    salt = _field(prompt, "cache_salt")
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise VLLMValidationError(
            "Parameter 'cache_salt' must be a non-empty string if provided.",
            parameter="cache_salt",
            value=salt,
        )
    return salt
