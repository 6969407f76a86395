# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/thinking_budget_state.py @ v0.25.0
"""An end to reasoning that goes on for longer than its request allows.

What is known of a request is a row of numbers on the device, moved on by each sampled token, so
that the host need not know the tokens. Upstream forgets a second block of reasoning that follows
one which ended by itself; here every block has the budget, and none is begun once it was used up.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.config import ReasoningConfig
from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode.metadata import PLACEHOLDER_TOKEN_ID, SpecDecodeMetadata
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState

THINKING, COUNT, SPENT, FORCED, BUDGET, WINDOW = range(6)
"""Columns of a row: whether it reasons, for how many tokens so far, whether a block was ended by
force, which token of the end marker is forced next (-1: none), the budget, the last tokens."""
CERTAIN = 1e9
"""Logit of a token that is forced."""


class ThinkingBudgetState:
    """Budgets by row; rows without one cost nothing."""

    def __init__(self, states: RequestState, config: ReasoningConfig | None) -> None:
        """config: with its markers as token ids; None where there is no reasoning."""
        self.states = states
        self.active = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self.start = np.array((config and config.reasoning_start_token_ids) or (), dtype=np.int64)
        self.end = np.array((config and config.reasoning_end_token_ids) or (), dtype=np.int64)
        self.window = max(len(self.start), len(self.end))
        self.table: Tensor | None = None

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's budget and look through the tokens it already has."""
        self.active[row] = params.thinking_token_budget is not None
        if not self.active[row]:
            return
        assert len(self.start) and len(self.end), "a budget is refused where there are no markers"
        states = self.states
        if self.table is None:
            shape = (states.max_num_reqs, WINDOW + self.window)
            self.table = torch.zeros(shape, dtype=torch.int64, device=states.device)
            self.start_t = to_device(self.start, states.device)
            self.end_t = to_device(self.end, states.device)
        prompt_len, total_len = int(states.prompt_len[row]), int(states.total_len[row])
        tokens = states.all_token_ids.np[row, :total_len].astype(np.int64)
        budget = params.thinking_token_budget
        assert budget is not None
        numbers = self._after_prompt(tokens[:prompt_len], budget)
        state = np.full(WINDOW + self.window, -1, dtype=np.int64)
        state[:WINDOW] = self._after_output(numbers, tokens, prompt_len)
        kept = tokens[-self.window :]
        state[WINDOW + self.window - len(kept) :] = kept
        self.table[row] = torch.from_numpy(state).to(states.device)

    def _after_prompt(self, prompt: np.ndarray, budget: int) -> tuple[int, ...]:
        """The first WINDOW numbers of the row of a request that has generated nothing."""
        started, ended = _last(prompt, self.start), _last(prompt, self.end)
        thinking = started > ended
        count = len(prompt) - started - len(self.start) if thinking else 0
        forced = 0 if thinking and count >= budget else -1
        return thinking, count, 0, forced, budget

    def _after_output(
        self, numbers: tuple[int, ...], tokens: np.ndarray, num_prompt: int
    ) -> tuple[int, ...]:
        """The same after all of `tokens`, whose first `num_prompt` led to `numbers`: what a call
        of `_advance` for each would give, by a look at those alone that change anything."""
        thinking, count, spent, forced, budget = numbers
        # Places of the tokens that complete a marker.
        ends = _places(tokens, self.end) + len(self.end) - 1
        starts = np.setdiff1d(_places(tokens, self.start) + len(self.start) - 1, ends)
        completes_end, completes_start = set(ends.tolist()), set(starts.tolist())
        output, end = tokens[num_prompt:].tolist(), self.end.tolist()
        at, total = num_prompt, len(tokens)
        while at < total:
            if forced < 0:  # no marker is under way, so the next event may be far
                event = min(_next(ends if thinking else starts, at), total)
                if thinking:
                    event = min(event, at + budget - count - 1)
                    count += event - at
                elif event > at:
                    count = 0
                at = event
                if at == total:
                    break
            count = count + 1 if thinking else 0
            thinking = at not in completes_end if thinking else at in completes_start
            obeyed = forced >= 0 and output[at - num_prompt] == end[forced]
            forced = forced + 1 if obeyed else -1
            if done := forced == len(end):
                spent = 1
            if done or forced < 0:
                forced = 0 if thinking and (count >= budget or spent) else -1
            at += 1
        return thinking, count, spent, forced, budget

    def apply(
        self, logits: Tensor, rows: np.ndarray, drafts: SpecDecodeMetadata | None = None
    ) -> None:
        """Leave, in place, rows whose budget is used up no choice; logits: [n, vocab].

        drafts: those of the batch whose logits these are; they count as generated.
        """
        places = np.flatnonzero(self.active[rows])
        if not len(places):
            return
        assert self.table is not None
        place = to_device(places, self.states.device)
        state = self.table[to_device(rows[places], self.states.device)]
        if drafts is not None:
            tokens, before = drafts.drafts_before(places)
            state = self._after(state, tokens, before)
        forced = state[:, FORCED]
        where = (place, self.end_t[forced.clamp(min=0)])
        logits[where] = torch.where(forced >= 0, CERTAIN, logits[where])

    def record(self, rows: np.ndarray, sampled: Tensor) -> None:
        """Move the rows on by the tokens just sampled; rows [n], sampled [n] or [n, k] with
        placeholders."""
        places = np.flatnonzero(self.active[rows])
        if not len(places):
            return
        assert self.table is not None
        index = to_device(rows[places], self.states.device)
        tokens = sampled[to_device(places, self.states.device)]
        tokens = tokens.reshape(len(places), -1)
        is_token = tokens != PLACEHOLDER_TOKEN_ID
        self.table[index] = self._after(self.table[index], tokens, is_token)

    def _after(self, state: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        """The rows [m, WINDOW + w] after those of tokens [m, k] for which counts [m, k] is true."""
        for token, here in zip(tokens.unbind(1), counts.unbind(1), strict=True):
            advanced = _advance(state, token, self.start_t, self.end_t)
            state = torch.where(here.unsqueeze(1), advanced, state)
        return state


def _advance(state: Tensor, tokens: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """The rows [n, WINDOW + w] after one more token each; tokens: int64 [n]."""
    window = torch.cat((state[:, WINDOW + 1 :], tokens.unsqueeze(1)), dim=1)
    ended = (window[:, -len(end) :] == end).all(dim=1)
    started = (window[:, -len(start) :] == start).all(dim=1)
    was_thinking, forced = state[:, THINKING] != 0, state[:, FORCED]
    thinking = torch.where(was_thinking, ~ended, started & ~ended)
    count = torch.where(was_thinking, state[:, COUNT] + 1, 0)
    # A grammar may have forbidden what was forced: the marker then begins anew.
    obeyed = tokens == end[forced.clamp(min=0)]
    following = torch.where((forced >= 0) & obeyed, forced + 1, -1)
    done = following == len(end)
    spent = (state[:, SPENT] != 0) | done
    used_up = thinking & ((count >= state[:, BUDGET]) | spent)
    following = torch.where(done | (following < 0), torch.where(used_up, 0, -1), following)
    numbers = (thinking.long(), count, spent.long(), following, state[:, BUDGET])
    return torch.cat((torch.stack(numbers, dim=1), window), dim=1)


def _places(tokens: np.ndarray, marker: np.ndarray) -> np.ndarray:
    """Where `marker` begins in `tokens`, in order."""
    if len(tokens) < len(marker):
        return np.empty(0, dtype=np.int64)
    found = (np.lib.stride_tricks.sliding_window_view(tokens, len(marker)) == marker).all(axis=1)
    return np.flatnonzero(found)


def _last(tokens: np.ndarray, marker: np.ndarray) -> int:
    """Where `marker` begins in `tokens` for the last time, -1 if it does not."""
    places = _places(tokens, marker)
    return int(places[-1]) if len(places) else -1


def _next(places: np.ndarray, at: int) -> int:
    """The first of the ordered `places` that is not before `at`; beyond all tokens if none is."""
    index = int(np.searchsorted(places, at))
    return int(places[index]) if index < len(places) else np.iinfo(np.int64).max
