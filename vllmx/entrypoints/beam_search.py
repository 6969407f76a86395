# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/generate/beam_search/{utils,offline,online}.py @ v0.25.0
"""Beam search over an engine that samples: each beam is a request of one token a step.

The prefix cache holds what beams have in common, so only their last tokens are computed.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllmx.logprobs import Logprob
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer
    from vllmx.structured_output.beams import BeamGrammar

Score = Callable[["BeamSearchSequence"], float]


@dataclass
class BeamSearchSequence:
    """A beam: its tokens, prompt included, and what is known of those after the prompt."""

    orig_prompt: Any
    """The prompt that it began with."""
    tokens: list[int]
    """Token ids, the prompt's first."""
    logprobs: list[dict[int, Logprob]]
    """Candidates at each position after the prompt."""
    lora_request: Any | None = None
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the tokens after the prompt."""
    text: str | None = None
    """Set when the search is over."""
    finish_reason: str | None = None
    """"stop" for a beam that an end token has ended."""
    stop_reason: int | str | None = None
    """The end token."""


@dataclass
class BeamSearchOutput:
    """The best beams of a prompt, best first; as many as the width unless fewer were found."""

    sequences: list[BeamSearchSequence]


def get_beam_search_score(
    tokens: Sequence[int],
    cumulative_logprob: float,
    eos_token_id: int | Collection[int] | None,
    length_penalty: float = 1.0,
) -> float:
    """The log-probability for each token, the prompt's and no end token counted.

    length_penalty is the exponent of the length: above 0 favours long sequences.
    """
    ends = {eos_token_id} if isinstance(eos_token_id, int) else eos_token_id or ()
    length = len(tokens) - (tokens[-1] in ends)
    try:
        divisor = float(length) ** length_penalty
    except (OverflowError, ZeroDivisionError):
        divisor = math.inf
    return cumulative_logprob / divisor if divisor else cumulative_logprob * math.inf


def create_sort_beams_key_function(
    eos_token_id: int | Collection[int] | None, length_penalty: float
) -> Score:
    """`get_beam_search_score` as a key to sort beams by."""

    def sort_beams_key(beam: BeamSearchSequence) -> float:
        return get_beam_search_score(beam.tokens, beam.cum_logprob, eos_token_id, length_penalty)

    return sort_beams_key


def step_params(params: BeamSearchParams, detokenize: bool = False) -> SamplingParams:
    """What every beam's request asks for: one token, and twice as many candidates as beams, so
    that enough are left when half of them end."""
    return SamplingParams(
        logprobs=2 * params.beam_width,
        max_tokens=1,
        temperature=params.temperature,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def constrained_step_params(plain: SamplingParams, allowed: list[int]) -> SamplingParams:
    """`plain` for a beam that may go on with `allowed` alone: all of them are candidates if they
    are few; else the likeliest are, of those that are allowed."""
    step = plain.clone()
    if len(allowed) <= MAX_LOGPROB_TOKEN_IDS:
        step.logprobs, step.logprob_token_ids = None, allowed
    else:
        step.allowed_token_ids = allowed
    return step


def _logprob_of(beam: BeamSearchSequence) -> float:
    return beam.cum_logprob


@dataclass
class BeamSearchInstance:
    """The search from one prompt."""

    prompt: Any
    prompt_token_ids: list[int]
    params: BeamSearchParams
    end_token_ids: frozenset[int]
    max_model_len: int
    lora_request: Any | None = None
    grammar: BeamGrammar | None = None
    """What its beams are held to."""
    prune_by_logprob: bool = False
    """Keep the candidates of the highest log-probability at a step, as upstream's server does, not
    of the highest score, as its LLM does. With ignore_eos a last end token makes them differ."""
    beams: list[BeamSearchSequence] = field(init=False)
    completed: list[BeamSearchSequence] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        start = BeamSearchSequence(
            self.prompt, list(self.prompt_token_ids), [], lora_request=self.lora_request
        )
        self.beams = [start]
        penalty = self.params.length_penalty
        score = create_sort_beams_key_function(self.end_token_ids, penalty)
        # An extreme penalty makes all scores one, 0 or minus infinity.
        self.score = lambda beam: (score(beam), beam.cum_logprob)
        self._allowed: list[frozenset[int]] = []

    def begin_step(self) -> list[SamplingParams]:
        """What the request of each beam asks for; beams whose grammar has ended are completed."""
        plain = step_params(self.params)
        if self.grammar is None:
            return [plain] * len(self.beams)
        going, steps = [], []
        self._allowed = []
        for beam in self.beams:
            allowed = self.grammar.allowed(beam.tokens[len(self.prompt_token_ids) :])
            if not allowed:
                beam.finish_reason = "stop"
                self.completed.append(beam)
                continue
            going.append(beam)
            self._allowed.append(frozenset(allowed))
            steps.append(constrained_step_params(plain, allowed))
        self.beams = going
        return steps

    def advance(self, results: Sequence[RequestOutput]) -> None:
        """Take the candidates of a step, one result a beam, and keep the best."""
        candidates: list[BeamSearchSequence] = []
        for i, (beam, result) in enumerate(zip(self.beams, results, strict=True)):
            # Without any the engine has ended it at once.
            for position in (result.outputs[0].logprobs or ())[:1]:
                for token_id, entry in position.items():
                    # What is likeliest may be forbidden, as the sampled token may be.
                    if self._allowed and token_id not in self._allowed[i]:
                        continue
                    candidates.append(self._extended(beam, token_id, position, entry.logprob))
        ended = [beam for beam in candidates if beam.finish_reason == "stop"]
        going = [beam for beam in candidates if beam.finish_reason is None]
        self.completed += ended
        going.sort(key=_logprob_of if self.prune_by_logprob else self.score, reverse=True)
        going = going[: self.params.beam_width]
        # One that fills the context is as long as it can get.
        self.completed += [beam for beam in going if len(beam.tokens) >= self.max_model_len]
        self.beams = [beam for beam in going if len(beam.tokens) < self.max_model_len]

    def _extended(
        self,
        beam: BeamSearchSequence,
        token_id: int,
        position: dict[int, Logprob],
        logprob: float,
    ) -> BeamSearchSequence:
        ends = token_id in self.end_token_ids and not self.params.ignore_eos
        return BeamSearchSequence(
            beam.orig_prompt,
            [*beam.tokens, token_id],
            [*beam.logprobs, position],
            lora_request=beam.lora_request,
            cum_logprob=beam.cum_logprob + logprob,
            finish_reason="stop" if ends else None,
            stop_reason=token_id if ends else None,
        )

    def best(self) -> list[BeamSearchSequence]:
        """The best beams so far, ended or not."""
        found = sorted([*self.completed, *self.beams], key=self.score, reverse=True)
        return found[: self.params.beam_width]


async def beam_search(
    instance: BeamSearchInstance,
    request_id: str,
    tokenizer: Tokenizer,
    generate: Callable[[list[int], SamplingParams, str], AsyncGenerator[RequestOutput, None]],
    prompt_text: str | None = None,
) -> AsyncGenerator[RequestOutput, None]:
    """One output, with the best beams as its answers.

    generate: runs the request of a beam, given its token ids, parameters and id. What one of them
    raises is raised here, and the others are given up.
    """
    for step in range(instance.params.max_tokens):
        asked = instance.begin_step()
        if not instance.beams:
            break
        tasks = [
            asyncio.ensure_future(_last(generate(beam.tokens, params, f"{request_id}-{step}-{i}")))
            for i, (beam, params) in enumerate(zip(instance.beams, asked, strict=True))
        ]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        instance.advance(results)
    yield RequestOutput(
        request_id=request_id,
        prompt=prompt_text,
        prompt_token_ids=instance.prompt_token_ids,
        prompt_logprobs=None,
        outputs=[_answer(instance, i, beam, tokenizer) for i, beam in enumerate(instance.best())],
        finished=True,
    )


async def _last(outputs: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    found = [output async for output in outputs]
    return found[-1]


def _answer(
    instance: BeamSearchInstance, index: int, beam: BeamSearchSequence, tokenizer: Tokenizer
) -> CompletionOutput:
    """A beam as an answer; its end token is no part of the text, and of the tokens only with
    include_stop_str_in_output."""
    token_ids, logprobs = beam.tokens[len(instance.prompt_token_ids) :], beam.logprobs
    text = tokenizer.decode(token_ids[:-1] if beam.finish_reason == "stop" else token_ids)
    if beam.finish_reason == "stop" and not instance.params.include_stop_str_in_output:
        token_ids, logprobs = token_ids[:-1], logprobs[:-1]
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=beam.cum_logprob,
        logprobs=logprobs,
        finish_reason=beam.finish_reason or "length",
        stop_reason=beam.stop_reason,
    )
