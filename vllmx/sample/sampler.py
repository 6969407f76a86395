# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/sampler.py @ v0.25.0
"""The sampler: an ordered list of features, each a small state with rows of requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.config import ReasoningConfig
from vllmx.core.output import LogprobsLists
from vllmx.sample.bad_words import BadWordsState
from vllmx.sample.custom import CustomProcessorsState
from vllmx.sample.logit_bias import LogitBiasState
from vllmx.sample.logits_processor.state import LogitsProcessors
from vllmx.sample.logprob import LogprobTokenIdsState, compute_topk_logprobs
from vllmx.sample.ops import SamplerOps, get_sampler_ops
from vllmx.sample.penalties import PenaltiesState
from vllmx.sample.states import NO_LOGPROBS, SamplingStates, random_generator
from vllmx.sample.thinking_budget import ThinkingBudgetState
from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode.metadata import SpecDecodeMetadata
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
        self,
        states: RequestState,
        logprobs_mode: str,
        seed: int,
        batch_invariant: bool = False,
        *,
        use_fp64_gumbel: bool = False,
        reasoning_config: ReasoningConfig | None = None,
        processors: LogitsProcessors | None = None,
        ops: SamplerOps | None = None,
    ) -> None:
        """ops: by default the provider of the device; processors: custom ones."""
        self.device = states.device
        self.logprobs_mode = logprobs_mode
        self.use_fp64_gumbel = use_fp64_gumbel
        self.ops = ops or get_sampler_ops(states.device, batch_invariant)
        # A library may add up the rows of a batch otherwise than a row alone.
        self.row_by_row = batch_invariant and not self.ops.batch_invariant
        self.sampling_states = SamplingStates(states.max_num_reqs, states.vocab_size, states.device)
        self.logit_bias_state = LogitBiasState(states.max_num_reqs, states.device)
        self.penalties_state = PenaltiesState(states, self.ops.apply_penalties)
        self.bad_words_state = BadWordsState(states)
        self.thinking_budget_state = ThinkingBudgetState(states, reasoning_config)
        self.logprob_token_ids_state = LogprobTokenIdsState(states.max_num_reqs, states.device)
        custom = CustomProcessorsState(states, processors or LogitsProcessors())
        self.custom: CustomProcessorsState | None = custom if custom.present else None
        # Rows that need more than an argmax over the raw logits.
        self.needs_processing = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self.generator = random_generator(seed, states.device)

    def add_request(self, row: int, prompt_len: int, params: SamplingParams) -> None:
        """Take over the parameters of the request in `row`."""
        self.sampling_states.add_request(row, params)
        self.logit_bias_state.add_request(row, prompt_len, params)
        self.penalties_state.add_request(row, params)
        self.bad_words_state.add_request(row, params)
        self.thinking_budget_state.add_request(row, params)
        self.logprob_token_ids_state.add_request(row, params)
        if self.custom is not None:
            self.custom.add_request(row, params)
        self.needs_processing[row] = (
            params.temperature != 0
            or self.logit_bias_state.active[row]
            or self.penalties_state.active[row]
            or self.bad_words_state.active[row]
            or self.thinking_budget_state.active[row]
            or self.custom is not None
        )

    def remove_request(self, row: int) -> None:
        """The request in `row` has ended or is preempted."""
        if self.custom is not None:
            self.custom.remove_request(row)

    def is_plain(self, rows: np.ndarray) -> bool:
        """Whether the rows want the likeliest token of the raw logits, and nothing beside."""
        return not (
            self.needs_processing[rows].any()
            or (self.sampling_states.num_logprobs[rows] != NO_LOGPROBS).any()
            or self.logprob_token_ids_state.active[rows].any()
        )

    @property
    def reads_sampled_tokens(self) -> bool:
        """Whether the tokens so far must be known on the host before the next are sampled."""
        return self.custom is not None

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        constrained: np.ndarray | None = None,
    ) -> SamplerOutput:
        """Sample from logits [n, vocab]; rows [n]: of the requests; positions [n]: last token's.

        constrained: int [m], which of the n have a grammar, whose mask is in the logits already.
        """
        processed = logits
        if self.needs_processing[rows].any():
            processed = self.apply_sampling_params(logits, rows, positions, constrained)
            temperature, seeds, has_seed = self.sampling_states.gather(rows)
            sampled = self.ops.gumbel_sample(
                processed,
                temperature,
                seeds,
                has_seed,
                to_device(positions, self.device),
                self.generator,
                self.use_fp64_gumbel,
            )
        else:
            sampled = logits.argmax(dim=-1)
        self.penalties_state.record(rows, sampled)
        self.thinking_budget_state.record(rows, sampled)
        if not self.wants_logprobs(rows):
            return SamplerOutput(sampled, None)
        source = processed if self.logprobs_processed else logits
        return SamplerOutput(sampled, self.compute_logprobs(source, rows, sampled))

    @property
    def logprobs_processed(self) -> bool:
        """Whether log-probabilities are of the logits that requests' parameters were applied to."""
        return self.logprobs_mode.startswith("processed")

    def wants_logprobs(self, rows: np.ndarray) -> bool:
        """Whether any of the rows asks for log-probabilities."""
        wanted = self.sampling_states.num_logprobs[rows] != NO_LOGPROBS
        return bool(wanted.any() or self.logprob_token_ids_state.active[rows].any())

    def compute_logprobs(self, logits: Tensor, rows: np.ndarray, sampled: Tensor) -> LogprobsLists:
        """What rows [n] ask for of logits [n, vocab]; sampled: int64 [n], the tokens chosen."""
        count = max(self.sampling_states.max_num_logprobs(rows), 0)
        named_ids = self.logprob_token_ids_state.gather(rows)
        as_logits = self.logprobs_mode.endswith("logits")
        values = self.ops.token_logits if as_logits else self.ops.token_logprobs
        return compute_topk_logprobs(logits, count, sampled, values, named_ids)

    def apply_sampling_params(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        constrained: np.ndarray | None = None,
        drafts: SpecDecodeMetadata | None = None,
    ) -> Tensor:
        """A float32 copy of logits with every request's parameters applied, in upstream's order.

        constrained: see `__call__`; drafts: what comes before each row beside the tokens that its
        request has. Then a request has several rows, each with its own position.
        """
        given, logits = logits, logits.to(torch.float32, copy=True)
        custom = self.custom
        self.logit_bias_state.apply(logits, rows, positions)
        if custom is not None:
            custom.update_state()
            logits = custom.apply(custom.processors.non_argmax_invariant, logits, rows)
        self.penalties_state.apply(logits, rows, drafts)
        self.bad_words_state.apply(logits, rows, drafts)
        self.thinking_budget_state.apply(logits, rows, drafts)
        self.sampling_states.apply_temperature(logits, rows)
        if custom is not None:
            logits = custom.apply(custom.processors.argmax_invariant, logits, rows)
        if constrained is not None:
            self._keep_to_grammars(logits, given, rows, constrained)
        apply_filters, top = self.sampling_states.apply_filters, self.ops.apply_top_k_top_p
        if not self.row_by_row:
            return apply_filters(logits, rows, top)
        for i in range(len(rows)):
            here = slice(i, i + 1)
            logits[here] = apply_filters(logits[here].clone(), rows[here], top)
        return logits

    def _keep_to_grammars(
        self, logits: Tensor, given: Tensor, rows: np.ndarray, constrained: np.ndarray
    ) -> None:
        """Forbid again, in place, what a grammar forbids and another rule has raised.

        Other rules (min_tokens, allowed_token_ids, bad_words, processors) may forbid all that a
        grammar allows: such a row goes by the grammar and its temperature alone.
        given: the logits before any rule, [n, vocab]; rows [n]; constrained: see `__call__`.
        """
        place = to_device(constrained.astype(np.int64), self.device)
        alone, ruled = given[place].to(torch.float32), logits[place]
        ruled.masked_fill_(alone == float("-inf"), float("-inf"))
        nothing_left = ruled.amax(dim=-1, keepdim=True) == float("-inf")
        self.sampling_states.apply_temperature(alone, rows[constrained])
        logits[place] = torch.where(nothing_left, alone, ruled)
