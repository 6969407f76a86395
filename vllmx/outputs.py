# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/outputs.py @ v0.25.0
"""What a request returns."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.logprobs import PromptLogprobs, SampleLogprobs
    from vllmx.metrics.stats import RequestStateStats

logger = logging.getLogger(__name__)


@dataclass
class CompletionOutput:
    """One of the `n` answers to a prompt."""

    index: int
    """Which of the answers, from 0."""
    text: str
    """Generated text."""
    token_ids: Sequence[int]
    """Generated tokens."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of the generated tokens; None unless logprobs were asked for."""
    logprobs: SampleLogprobs | None
    """One position for each generated token, if asked for."""
    routed_experts: Any | None = None
    """Which experts computed each token, where the model reports it."""
    finish_reason: str | None = None
    """stop, length, abort, error or repetition; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended it; None for the end-of-sequence token. Where a
    constraint could not be compiled (`finish_reason` "error"): why."""
    lora_request: Any | None = None
    """The adapter that was used."""

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        return (
            f"CompletionOutput(index={self.index}, "
            f"text={self.text!r}, "
            f"token_ids={self.token_ids}, "
            f"routed_experts={self.routed_experts}, "
            f"cumulative_logprob={self.cumulative_logprob}, "
            f"logprobs={self.logprobs}, "
            f"finish_reason={self.finish_reason}, "
            f"stop_reason={self.stop_reason})"
        )


class RequestOutput:
    """The answers to one prompt, all of them or what is new, as `output_kind` says.

    `request_id` is the caller's; `finished` is True once all the answers are complete;
    `metrics` holds times (None unless statistics are kept); `num_cached_tokens` counts prompt
    tokens that came from the prefix cache.
    """

    # Answer -> place in `outputs`, once there is something to merge; most outputs never are.
    _places: dict[int, int] | None = None

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        lora_request: Any | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs:  # arguments of a later release must not break code written for it
            logger.warning("RequestOutput: ignoring unknown arguments %s", ", ".join(kwargs))
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.kv_transfer_params = kv_transfer_params

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later output of the same request into this one.

        `aggregate`: both hold what is new, so answers of equal index are joined; otherwise the
        later one replaces the earlier.
        """
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params
        if next_output.prompt_logprobs:
            self.prompt_logprobs = next_output.prompt_logprobs
        places = self._places
        if places is None or len(places) != len(self.outputs):
            places = self._places = {part.index: i for i, part in enumerate(self.outputs)}
        for completion in next_output.outputs:
            place = places.get(completion.index)
            if place is None:
                places[completion.index] = len(self.outputs)
                self.outputs.append(completion)
            elif aggregate:
                _join(self.outputs[place], completion)
            else:
                self.outputs[place] = completion

    def __repr__(self) -> str:
        return (
            f"RequestOutput(request_id={self.request_id}, "
            f"prompt={self.prompt!r}, "
            f"prompt_token_ids={self.prompt_token_ids}, "
            f"encoder_prompt={self.encoder_prompt!r}, "
            f"encoder_prompt_token_ids={self.encoder_prompt_token_ids}, "
            f"prompt_logprobs={self.prompt_logprobs}, "
            f"outputs={self.outputs}, "
            f"finished={self.finished}, "
            f"metrics={self.metrics}, "
            f"lora_request={self.lora_request}, "
            f"num_cached_tokens={self.num_cached_tokens})"
        )


def _join(first: CompletionOutput, second: CompletionOutput) -> None:
    first.text += second.text
    # A new list: the one in hand came from the engine core, which runs in another thread.
    first.token_ids = [*first.token_ids, *second.token_ids]
    if second.logprobs:
        assert first.logprobs is not None
        first.logprobs.extend(second.logprobs)  # type: ignore[arg-type]
    first.cumulative_logprob = second.cumulative_logprob
    first.finish_reason = second.finish_reason
    first.stop_reason = second.stop_reason
    if second.routed_experts is not None:
        first.routed_experts = second.routed_experts
