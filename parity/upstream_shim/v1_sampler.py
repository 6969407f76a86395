# SPDX-License-Identifier: Apache-2.0
"""Upstream's V1 sampler by the states of vllmx's, which follow Model Runner V2.

A V1 call brings everything along that V2 keeps in rows: each is written into a row of new states,
and vllmx does the work.
"""

from __future__ import annotations

import random as python_random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import LogprobsLists
from vllmx.engine import logprobs as engine_logprobs
from vllmx.entrypoints.beam_search import BeamSearchInstance, beam_search
from vllmx.outputs import RequestOutput
from vllmx.sample import logits_processor
from vllmx.sample.bad_words import BadWordsState
from vllmx.sample.gumbel import gumbel_sample
from vllmx.sample.logit_bias import LogitBiasState
from vllmx.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllmx.sample.logprob import compute_topk_logprobs, token_logits
from vllmx.sample.penalties import PenaltiesState
from vllmx.sample.states import SamplingStates
from vllmx.sample.topk_topp import apply_top_k_top_p
from vllmx.sampling_params import BeamSearchParams, SamplingParams
from vllmx.worker.states import RequestState


@dataclass
class SamplingMetadata:
    """What a V1 call is told of its batch."""

    temperature: Tensor | None = None
    all_greedy: bool = True
    all_random: bool = False
    top_p: Tensor | None = None
    top_k: Tensor | None = None
    generators: dict[int, torch.Generator] = field(default_factory=dict)
    max_num_logprobs: int | None = None
    no_penalties: bool = True
    prompt_token_ids: Tensor | None = None
    frequency_penalties: Any = None
    presence_penalties: Any = None
    repetition_penalties: Any = None
    output_token_ids: list[list[int]] = field(default_factory=list)
    allowed_token_ids_mask: Tensor | None = None
    bad_words_token_ids: dict[int, list[list[int]]] = field(default_factory=dict)
    logitsprocs: LogitsProcessors = field(default_factory=LogitsProcessors)
    logprob_token_ids: dict[int, list[int]] | None = None
    spec_token_ids: list[list[int]] | None = None
    thinking_budget_state_holder: Any = None


def make_rows(
    count: int, vocab: int, prompts: Tensor | None, outputs: list[list[int]]
) -> RequestState:
    """A row of states for each request, with its prompt and output."""
    prompt_ids = [[] for _ in range(count)] if prompts is None else prompts.tolist()
    # A prompt is filled up with an id that no token has.
    prompt_ids = [[token for token in row if token < vocab] for row in prompt_ids]
    longest = max(len(p) + len(o) for p, o in zip(prompt_ids, outputs, strict=True)) + 1
    states = RequestState(count, longest, vocab, "cpu")
    for i, (prompt, output) in enumerate(zip(prompt_ids, outputs, strict=True)):
        states.add_request(str(i), len(prompt), [*prompt, *output], 0)
    return states


class Sampler:
    """The steps of upstream's that its tests call by themselves."""

    def __init__(self, logprobs_mode: str = "raw_logprobs", use_fp64_gumbel: bool = False) -> None:
        self.logprobs_mode = logprobs_mode
        self.topk_topp_sampler = SimpleNamespace(use_fp64_gumbel=use_fp64_gumbel)

    @staticmethod
    def apply_penalties(
        logits: Tensor, sampling_metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> Tensor:
        """The logits, penalised."""
        if sampling_metadata.no_penalties:
            return logits
        states = make_rows(*logits.shape, sampling_metadata.prompt_token_ids, output_token_ids)
        penalties = PenaltiesState(states)
        for i in range(len(logits)):
            params = SamplingParams(
                presence_penalty=float(sampling_metadata.presence_penalties[i]),
                frequency_penalty=float(sampling_metadata.frequency_penalties[i]),
                repetition_penalty=float(sampling_metadata.repetition_penalties[i]),
            )
            penalties.add_request(states.req_id_to_index[str(i)], params)
        penalties.apply(
            logits, np.array([states.req_id_to_index[str(i)] for i in range(len(logits))])
        )
        return logits

    def apply_logits_processors(
        self, logits: Tensor, sampling_metadata: SamplingMetadata, predict_bonus_token: bool
    ) -> Tensor:
        """Allowed tokens, bad words, processors and penalties, in upstream's order."""
        outputs = sampling_metadata.output_token_ids or [[] for _ in logits]
        states = make_rows(*logits.shape, sampling_metadata.prompt_token_ids, outputs)
        rows = np.array([states.req_id_to_index[str(i)] for i in range(len(logits))])
        allowed = LogitBiasState(len(logits), "cpu")
        words = BadWordsState(states)
        mask = sampling_metadata.allowed_token_ids_mask
        for i, row in enumerate(rows.tolist()):
            params = SamplingParams()
            if mask is not None and bool(mask[i].any()):
                params.allowed_token_ids = (~mask[i]).nonzero().flatten().tolist()
            params._bad_words_token_ids = sampling_metadata.bad_words_token_ids.get(i)
            allowed.add_request(row, int(states.prompt_len[row]), params)
            words.add_request(row, params)
        allowed.apply(logits, rows, states.total_len[rows] - 1)
        words.apply(logits, rows)
        for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
            logits = processor.apply(logits)
        return self.apply_penalties(logits, sampling_metadata, outputs)

    @staticmethod
    def gather_logprobs(logprobs: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsLists:
        """The chosen tokens and the likeliest."""
        return compute_topk_logprobs(logprobs, num_logprobs, token_ids, token_logits)


def apply_top_k_top_p_pytorch(
    logits: Tensor, k: Tensor | None, p: Tensor | None, allow_cpu_sync: bool = False
) -> Tensor:
    """Filters under upstream's names."""
    return apply_top_k_top_p(logits, k, p)


def random_sample(
    probs: Tensor, generators: dict[int, torch.Generator], use_fp64_gumbel: bool = False
) -> Tensor:
    """Draws from probabilities, of which vllmx takes the logarithms."""
    count = len(probs)
    none = torch.zeros(count, dtype=torch.int64)
    return gumbel_sample(
        *(probs.log(), torch.ones(count), none, none.bool(), none),
        torch.default_generator,
        use_fp64_gumbel,
    )


class _StateProcessor(logits_processor.LogitsProcessor):
    """One of the sampler's states in the form of a processor, by the parameters of each place."""

    invariant = False

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[SamplingParams, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """See LogitsProcessor."""
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor."""
        logits_processor.process_dict_updates(
            self.requests, batch_update, lambda params, _, output: (params, output)
        )

    def _lengths(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Places with a request, and how many tokens each has generated."""
        places = np.array(sorted(i for i in self.requests if i < count), dtype=np.int64)
        return places, np.array([len(self.requests[i][1]) for i in places.tolist()], dtype=np.int64)


class LogitBiasLogitsProcessor(_StateProcessor):
    """Logit biases."""

    def _params(self, params: SamplingParams) -> SamplingParams:
        return SamplingParams(logit_bias=params.logit_bias)

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        state = LogitBiasState(len(logits), "cpu")
        places, lengths = self._lengths(len(logits))
        for place in places.tolist():
            state.add_request(place, 0, self._params(self.requests[place][0]))
        part = logits[places]
        state.apply(part, places, lengths - 1)
        logits[places] = part
        return logits


class MinTokensLogitsProcessor(LogitBiasLogitsProcessor):
    """No end before min_tokens."""

    @property
    def min_toks(self) -> dict[int, tuple[int, list[int], set[int]]]:
        """Minimum, output and end tokens by place, of requests that have not reached it."""
        return {
            place: (params.min_tokens, output, params.all_stop_token_ids)
            for place, (params, output) in self.requests.items()
            if len(output) < params.min_tokens
        }

    def _params(self, params: SamplingParams) -> SamplingParams:
        kept = SamplingParams(min_tokens=params.min_tokens, max_tokens=None)
        kept._all_stop_token_ids = params.all_stop_token_ids
        return kept


class MinPLogitsProcessor(_StateProcessor):
    """Tokens that are unlikely beside the likeliest."""

    invariant = True

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        state = SamplingStates(len(logits), logits.shape[1], "cpu")
        places, _ = self._lengths(len(logits))
        for place in places.tolist():
            state.add_request(place, SamplingParams(min_p=self.requests[place][0].min_p))
        part = logits[places]
        logits[places] = state.apply_filters(part, places, apply_top_k_top_p)
        return logits


def build_logitsprocs(
    vllm_config: Any,
    device: torch.device,
    is_pin_memory: bool,
    is_pooling_model: bool,
    custom_logitsprocs: Sequence[Any] = (),
) -> LogitsProcessors:
    """Those that upstream has built in, then what vllmx builds."""
    built_in = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    own = logits_processor.build_logitsprocs(
        vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs
    )
    return LogitsProcessors(
        [*(cls(vllm_config, device, is_pin_memory) for cls in built_in), *own.all]
    )


class LogprobsProcessor(engine_logprobs.LogprobsProcessor):
    """Has the decoding of one token in a context as a method."""

    def __post_init__(self) -> None:
        """No texts by pieces: the tests' tokenizers only decode."""
        self._texts = self._prompt_texts = None

    def _correct_decoded_token(self, token_id: int, context_token_ids: list[int]) -> str:
        assert self.tokenizer is not None
        decode = self.tokenizer.decode
        return engine_logprobs.decode_in_context(decode, token_id, context_token_ids)


class BeamSearchOnlineMixin:
    """Beam search of a server that brings its renderer and its engine."""

    renderer: Any
    engine_client: Any

    async def beam_search(
        self, prompt: dict[str, Any], request_id: str, params: BeamSearchParams
    ) -> AsyncGenerator[RequestOutput, None]:
        """The one output."""
        tokenizer = self.renderer.get_tokenizer()

        def generate(token_ids: list[int], step: SamplingParams, step_id: str) -> Any:
            given = {**prompt, "prompt_token_ids": token_ids}
            return self.engine_client.generate(given, step, step_id)

        ends = frozenset({tokenizer.eos_token_id})
        instance = BeamSearchInstance(prompt, prompt["prompt_token_ids"], params, ends, 1 << 30)
        text = prompt.get("prompt")
        async for output in beam_search(instance, request_id, tokenizer, generate, text):
            yield output


def set_random_seed(seed: int) -> None:
    """Seed every generator that has no owner."""
    python_random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_tensor_with_pad(
    x: list[list[int]],
    pad: int,
    dtype: torch.dtype,
    *,
    device: Any = None,
    pin_memory: bool = False,
    max_len: int | None = None,
) -> Tensor:
    """Lists as the rows of a table, filled up on the right."""
    width = max(map(len, x)) if max_len is None else max_len
    rows = [row + [pad] * (width - len(row)) for row in x]
    return torch.tensor(rows, dtype=dtype, device=device).reshape(len(x), width)
