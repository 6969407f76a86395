# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/sampler.py @ v0.25.0
"""The sampler: an ordered list of features, each a small state with rows of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import LogprobsLists
from vllmx.sample.bad_words import BadWordsState
from vllmx.sample.gumbel import gumbel_sample
from vllmx.sample.logit_bias import LogitBiasState
from vllmx.sample.logprob import LogprobTokenIdsState, compute_topk_logprobs, get_log_softmax
from vllmx.sample.penalties import PenaltiesState
from vllmx.sample.states import NO_LOGPROBS, SamplingStates, random_generator
from vllmx.sampling_params import SamplingParams
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState


@dataclass
class SamplerOutput:
    """sampled_token_ids: int64 [n] on the device; logprobs: rows in the same order, or None."""

    sampled_token_ids: Tensor
    logprobs: LogprobsLists | None


class Sampler:
    """Chooses the next token of each row of logits."""

    def __init__(
        self, states: RequestState, logprobs_mode: str, seed: int, batch_invariant: bool = False
    ) -> None:
        self.device = states.device
        self.logprobs_mode = logprobs_mode
        self.sampling_states = SamplingStates(states.max_num_reqs, states.vocab_size, states.device)
        self.logit_bias_state = LogitBiasState(states.max_num_reqs, states.device)
        self.penalties_state = PenaltiesState(states)
        self.bad_words_state = BadWordsState(states)
        self.logprob_token_ids_state = LogprobTokenIdsState(states.max_num_reqs, states.device)
        # Rows that need more than an argmax over the raw logits.
        self.needs_processing = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self.generator = random_generator(seed, states.device)
        self.batch_invariant = batch_invariant
        self.log_softmax = get_log_softmax(batch_invariant)

    def add_request(self, row: int, prompt_len: int, params: SamplingParams) -> None:
        """Take over the parameters of the request in `row`."""
        self.sampling_states.add_request(row, params)
        self.logit_bias_state.add_request(row, prompt_len, params)
        self.penalties_state.add_request(row, params)
        self.bad_words_state.add_request(row, params)
        self.logprob_token_ids_state.add_request(row, params)
        self.needs_processing[row] = (
            params.temperature != 0
            or self.logit_bias_state.active[row]
            or self.penalties_state.active[row]
            or self.bad_words_state.active[row]
        )

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether the rows want the likeliest token of the raw logits, and nothing beside."""
        return not (
            self.needs_processing[rows].any()
            or (self.sampling_states.num_logprobs[rows] != NO_LOGPROBS).any()
            or self.logprob_token_ids_state.active[rows].any()
        )

    @property
    def reads_sampled_tokens(self) -> bool:
        """Whether a request wants its tokens so far to be known on the host before the next."""
        return bool(self.bad_words_state.words)

    def __call__(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> SamplerOutput:
        """Sample from logits [n, vocab]; rows [n]: of the requests; positions [n]: last token's."""
        num_logprobs = self.sampling_states.max_num_logprobs(rows)
        named_ids = self.logprob_token_ids_state.gather(rows)
        wants_logprobs = num_logprobs != NO_LOGPROBS or named_ids is not None
        processed = logits
        if self.needs_processing[rows].any():
            processed = self.apply_sampling_params(logits, rows, positions)
            temperature, seeds, has_seed = self.sampling_states.gather(rows)
            sampled = gumbel_sample(
                processed,
                temperature,
                seeds,
                has_seed,
                to_device(positions, self.device),
                self.generator,
            )
        else:
            sampled = logits.argmax(dim=-1)
        self.penalties_state.record(rows, sampled)
        if not wants_logprobs:
            return SamplerOutput(sampled, None)
        values = self._logprob_values(logits, processed)
        count = max(num_logprobs, 0)
        return SamplerOutput(sampled, compute_topk_logprobs(values, count, sampled, named_ids))

    def apply_sampling_params(
        self, logits: Tensor, rows: np.ndarray, positions: np.ndarray
    ) -> Tensor:
        """A float32 copy of logits with every request's parameters applied, in upstream's order."""
        logits = logits.to(torch.float32, copy=True)
        self.logit_bias_state.apply(logits, rows, positions)
        self.penalties_state.apply(logits, rows)
        self.bad_words_state.apply(logits, rows)
        self.sampling_states.apply_temperature(logits, rows)
        if not self.batch_invariant:
            return self.sampling_states.apply_filters(logits, rows)
        # A library may add up the rows of a batch otherwise than a row alone.
        for i in range(len(rows)):
            here = slice(i, i + 1)
            logits[here] = self.sampling_states.apply_filters(logits[here].clone(), rows[here])
        return logits

    def _logprob_values(self, raw: Tensor, processed: Tensor) -> Tensor:
        source = processed if self.logprobs_mode.startswith("processed") else raw
        if self.logprobs_mode.endswith("logits"):
            return source.to(torch.float32)
        return self.log_softmax(source)
