# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/spec_decode/rejection_sampler.py @ v0.25.0
"""Verifies drafted tokens, so that what comes out is distributed as without drafts.

A draft x is accepted with probability min(1, p(x) / q(x)), p being the target's distribution and q
the drafter's; the first one rejected is replaced by a token drawn from max(p - q, 0), normalised,
and after the last one accepted a bonus token is drawn from p. A drafter without probabilities has
q = 1 for its draft. A greedy request accepts the likeliest token alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.config import SpeculativeConfig
from vllmx.core.output import LogprobsLists
from vllmx.sample.gumbel import SMALLEST_UNIFORM, philox, to_uniform
from vllmx.sample.logprob import get_log_softmax
from vllmx.sample.sampler import Sampler
from vllmx.spec_decode.metadata import PLACEHOLDER_TOKEN_ID, SpecDecodeMetadata
from vllmx.worker.buffer_utils import to_device

NEVER = float("-inf")


@dataclass
class RejectionSamplerOutput:
    """sampled_token_ids: int64 [batch, max_spec_len + 1] on the device, filled up with
    PLACEHOLDER_TOKEN_ID; num_sampled: int64 [batch], how many of them are tokens; logprobs: rows
    of the tokens alone, or None."""

    sampled_token_ids: Tensor
    num_sampled: Tensor
    logprobs: LogprobsLists | None


class RejectionSampler:
    """Chooses the next tokens of requests with drafts."""

    def __init__(self, sampler: Sampler, config: SpeculativeConfig | None = None) -> None:
        """sampler: applies the requests' parameters, and has no custom processors, which
        speculative decoding refuses; config: how drafts are verified, by default by their
        probabilities."""
        assert sampler.custom is None, "custom processors are refused beside drafts"
        self.sampler = sampler
        self.device = sampler.device
        self.log_softmax = get_log_softmax(sampler.row_by_row)
        method = "standard" if config is None else config.rejection_sample_method
        self.verifies_blocks = method == "block"
        self.synthetic_rates: Tensor | None = None
        if method == "synthetic":
            assert config is not None and config.synthetic_acceptance_rates is not None
            rates = unconditional_to_conditional_rates(config.synthetic_acceptance_rates)
            self.synthetic_rates = torch.tensor(rates, dtype=torch.float32, device=self.device)

    def __call__(
        self,
        logits: Tensor,
        rows: np.ndarray,
        positions: np.ndarray,
        drafts: SpecDecodeMetadata,
        draft_probs: Tensor | None = None,
        constrained: np.ndarray | None = None,
    ) -> RejectionSamplerOutput:
        """logits: [num_logits, vocab], in the order that `drafts` describes; rows, positions:
        [batch], of the requests and of the last token each has without its drafts; draft_probs:
        float32 [batch, max_spec_len, vocab or fewer], what each draft was drawn from, None if
        drafts come without probabilities; constrained: which rows of the logits have a grammar.
        """
        sampler = self.sampler
        logit_rows = rows[drafts.requests]
        processed = logits
        if sampler.needs_processing[rows].any():
            logit_positions = positions[drafts.requests] + drafts.local_pos
            processed = sampler.apply_sampling_params(
                logits, logit_rows, logit_positions, constrained, drafts
            )
        temperature, seeds, has_seed = sampler.sampling_states.gather(rows)
        greedy = temperature == 0
        first = to_device(positions, self.device)
        uniform = self._uniform(seeds, has_seed, first, drafts.max_spec_len)
        all_greedy = not sampler.sampling_states.temperature[rows].any()
        accepted, scale = self._verify(
            processed, drafts, draft_probs, None if all_greedy else greedy, uniform
        )
        last = self._next_token_logits(processed, drafts, draft_probs, accepted, greedy, scale)
        chosen = sampler.ops.gumbel_sample(
            last,
            temperature,
            seeds,
            has_seed,
            first + accepted,
            sampler.generator,
            sampler.use_fp64_gumbel,
        )
        sampled = join(drafts, accepted, chosen)
        sampler.penalties_state.record(rows, sampled)
        sampler.thinking_budget_state.record(rows, sampled)
        logprobs = None
        if sampler.wants_logprobs(rows):
            source = processed if sampler.logprobs_processed else logits
            logprobs = self._logprobs(source, logit_rows, drafts, sampled, accepted)
        return RejectionSamplerOutput(sampled, accepted + 1, logprobs)

    def _uniform(self, seeds: Tensor, has_seed: Tensor, first: Tensor, width: int) -> Tensor:
        """A number in (0, 1) for each draft, float32 [batch, width]; from the request's seed and
        the draft's position where it has a seed, so that the batch does not change it."""
        shape = (len(seeds), width)
        drawn = torch.rand(shape, generator=self.sampler.generator, device=self.device)
        drawn.clamp_(min=SMALLEST_UNIFORM)
        at = first.unsqueeze(1) + torch.arange(width, device=self.device)
        words, _ = philox(seeds.unsqueeze(1), at)
        return torch.where(has_seed.unsqueeze(1), to_uniform(words), drawn)

    def _verify(
        self,
        logits: Tensor,
        drafts: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        greedy: Tensor | None,
        uniform: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """How many drafts of each request stand, int64 [batch], and with blocks what `_blocks`
        gives beside. greedy: bool [batch], or None if all requests are."""
        tokens = drafts.draft_token_ids
        is_draft = tokens != PLACEHOLDER_TOKEN_ID
        if self.synthetic_rates is not None:
            return leading((uniform < self.synthetic_rates[: tokens.shape[1]]) & is_draft), None
        offsets = torch.arange(drafts.max_spec_len, device=self.device)
        place = drafts.first_logits_indices.unsqueeze(1) + offsets
        # A place that has no draft is judged by the bonus token's logits, and does not count.
        place = torch.minimum(place, drafts.bonus_logits_indices.unsqueeze(1))
        agreed = leading((logits.argmax(dim=-1)[place] == tokens) & is_draft)
        if greedy is None:
            return agreed, None
        given = tokens.clamp(min=0)
        log_probs, _ = self.sampler.ops.token_logprobs(
            logits[place.flatten()], given.reshape(-1, 1)
        )
        log_ratio = log_probs.reshape(tokens.shape)
        if draft_probs is not None:
            drawn_from = draft_probs.gather(2, given.unsqueeze(2)).squeeze(2)
            # What was drawn has a probability; without one there is nothing to compare with.
            log_ratio = torch.where(drawn_from > 0, log_ratio - drawn_from.log(), NEVER)
        log_ratio = log_ratio.masked_fill(~is_draft, NEVER)
        if not self.verifies_blocks:
            return torch.where(greedy, agreed, leading(log_ratio > uniform.log())), None
        drawn, scale = self._blocks(logits[place], log_ratio, tokens, draft_probs, uniform)
        return torch.where(greedy, agreed, drawn), scale

    def _blocks(
        self,
        logits: Tensor,
        log_ratio: Tensor,
        tokens: Tensor,
        draft_probs: Tensor | None,
        uniform: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Block verification: the longest prefix of the drafts that stands as a whole.

        logits: [batch, k, vocab]; log_ratio, tokens, uniform: [batch, k]. Returns its length, int64
        [batch], and by length how much of the target's mass the prefix has, at most 1, float32
        [batch, k + 1].
        """
        batch, width = tokens.shape
        log_scale = log_ratio.new_zeros((batch, width + 1))
        for i in range(width):
            log_scale[:, i + 1] = (log_scale[:, i] + log_ratio[:, i]).clamp(max=0)
        scale = log_scale.exp()
        length = torch.zeros(batch, dtype=torch.int64, device=tokens.device)
        for i in range(width):
            mass = scale[:, i + 1]
            left = mass
            if i + 1 < width:
                probs = self.log_softmax(logits[:, i + 1]).exp() * mass.unsqueeze(1)
                following = None if draft_probs is None else draft_probs[:, i + 1]
                left = residual(probs, tokens[:, i + 1], following).sum(dim=1)
            all_of_it = left + 1 - mass
            share = torch.where(all_of_it > 0, left / all_of_it, 1.0)
            length = torch.where(uniform[:, i] <= share, i + 1, length)
        return length, scale

    def _next_token_logits(
        self,
        logits: Tensor,
        drafts: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        accepted: Tensor,
        greedy: Tensor,
        scale: Tensor | None,
    ) -> Tensor:
        """What the token after the accepted drafts is drawn from, float32 [batch, vocab].

        accepted, greedy: [batch]; scale: see `_blocks`.
        """
        last = logits[drafts.first_logits_indices + accepted].float()
        if drafts.max_spec_len == 0:
            return last
        rejected = accepted.clamp(max=drafts.max_spec_len - 1).unsqueeze(1)
        token = drafts.draft_token_ids.gather(1, rejected).squeeze(1)
        token = torch.where(accepted == to_device(drafts.num_draft_tokens, self.device), -1, token)
        if draft_probs is None:
            left = last.scatter(1, token.clamp(min=0).unsqueeze(1), NEVER)
        else:
            probs = self.log_softmax(last).exp()
            if scale is not None:
                probs = probs * scale.gather(1, accepted.unsqueeze(1))
            batch = torch.arange(len(token), device=self.device)
            left = residual(probs, token, draft_probs[batch, rejected.squeeze(1)]).log()
        # Rounding, and rejection at a given rate, may leave nothing.
        drawn = (token != PLACEHOLDER_TOKEN_ID) & ~greedy & (left.amax(dim=1) > NEVER)
        return torch.where(drawn.unsqueeze(1), left, last)

    def _logprobs(
        self,
        logits: Tensor,
        logit_rows: np.ndarray,
        drafts: SpecDecodeMetadata,
        sampled: Tensor,
        accepted: Tensor,
    ) -> LogprobsLists:
        """Of the tokens that were sampled; those of a request follow one another."""
        counts = accepted.cpu().numpy() + 1
        places = np.flatnonzero(drafts.local_pos < counts[drafts.requests])
        where = (
            to_device(drafts.requests[places], self.device),
            to_device(drafts.local_pos[places], self.device),
        )
        lists = self.sampler.compute_logprobs(
            logits[to_device(places, self.device)], logit_rows[places], sampled[where]
        )
        starts = np.concatenate(([0], np.cumsum(counts))).tolist()
        return lists._replace(cu_num_generated_tokens=starts)


def leading(holds: Tensor) -> Tensor:
    """How many are true before the first that is not, int64 [n]; holds: bool [n, k]."""
    return holds.long().cumprod(dim=1).sum(dim=1)


def residual(probs: Tensor, tokens: Tensor, draft_probs: Tensor | None) -> Tensor:
    """What a draft leaves of its target's distribution, max(p - q, 0); float32 [n, vocab].

    probs: [n, vocab]; tokens: int64 [n], the drafts; draft_probs: [n, vocab or fewer], what they
    were drawn from, None: each was certain. A placeholder leaves everything.
    """
    is_draft = (tokens != PLACEHOLDER_TOKEN_ID).to(probs.dtype).unsqueeze(1)
    left = probs.clone()
    if draft_probs is None:
        certain = tokens.clamp(min=0).unsqueeze(1)
        left.scatter_add_(1, certain, -is_draft)
    else:
        left[:, : draft_probs.shape[1]] -= draft_probs * is_draft
    return left.clamp_(min=0)


def join(drafts: SpecDecodeMetadata, accepted: Tensor, chosen: Tensor) -> Tensor:
    """The accepted drafts and the token chosen after them, int64 [batch, max_spec_len + 1], filled
    up with placeholders; accepted, chosen: int64 [batch]."""
    length = accepted.unsqueeze(1)
    column = torch.arange(drafts.max_spec_len + 1, device=accepted.device)
    tokens = torch.nn.functional.pad(drafts.draft_token_ids, (0, 1))
    tokens = torch.where(column < length, tokens, PLACEHOLDER_TOKEN_ID)
    return tokens.scatter(1, length, chosen.unsqueeze(1))


def unconditional_to_conditional_rates(rates: list[float]) -> list[float]:
    """Rates at which position i is accepted, given that those before it are; `rates`: at which all
    up to i are. 0 after a position that never is."""
    before = [1.0, *rates[:-1]]
    return [rate / given if given > 0 else 0.0 for rate, given in zip(rates, before, strict=True)]
