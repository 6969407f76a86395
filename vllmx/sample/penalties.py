# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/penalties.py @ v0.25.0
"""Presence, frequency and repetition penalties."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode.metadata import PLACEHOLDER_TOKEN_ID, SpecDecodeMetadata
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState


def apply_penalties(
    logits: Tensor,
    place: Tensor,
    index: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
) -> None:
    """Penalise logits [n, vocab] float32 in place: rows `place`, by rows `index` of the tables.

    place, index: int [m]; the penalties: float32 [m]; tables: int32 and bool [rows, vocab].
    """
    counts, in_prompt = output_counts[index], prompt_mask[index]
    part, column = logits[place], repetition.unsqueeze(1)
    factor = torch.where(part > 0, 1 / column, column)
    part = torch.where(in_prompt | (counts > 0), part * factor, part)
    part -= frequency.unsqueeze(1) * counts
    part -= presence.unsqueeze(1) * (counts > 0)
    logits[place] = part


class PenaltiesState:
    """Counts of each row's generated tokens and which tokens its prompt has.

    The tables, [max_num_reqs, vocab], are made when the first request with a penalty arrives.
    """

    def __init__(
        self, states: RequestState, apply_fn: Callable[..., None] = apply_penalties
    ) -> None:
        """apply_fn: `apply_penalties` of the sampler's provider."""
        self.states = states
        self.apply_penalties = apply_fn
        self.presence = np.zeros(states.max_num_reqs, dtype=np.float32)
        self.frequency = np.zeros(states.max_num_reqs, dtype=np.float32)
        self.repetition = np.ones(states.max_num_reqs, dtype=np.float32)
        self.active = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self.output_counts: Tensor | None = None
        self.prompt_mask: Tensor

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's penalties and count the tokens it already has."""
        self.presence[row] = params.presence_penalty
        self.frequency[row] = params.frequency_penalty
        self.repetition[row] = params.repetition_penalty
        self.active[row] = (
            params.presence_penalty != 0
            or params.frequency_penalty != 0
            or params.repetition_penalty != 1
        )
        if not self.active[row]:
            return
        states = self.states
        if self.output_counts is None:
            shape = (states.max_num_reqs, states.vocab_size)
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=states.device)
            self.prompt_mask = torch.zeros(shape, dtype=torch.bool, device=states.device)
        prompt_len, total_len = int(states.prompt_len[row]), int(states.total_len[row])
        tokens = torch.from_numpy(states.all_token_ids.np[row, :total_len].astype(np.int64))
        self.prompt_mask[row].zero_()
        self.prompt_mask[row, tokens[:prompt_len].to(states.device)] = True
        self.output_counts[row] = torch.bincount(
            tokens[prompt_len:], minlength=states.vocab_size
        ).to(states.device, torch.int32)

    def record(self, rows: np.ndarray, sampled: Tensor) -> None:
        """Count the tokens just sampled; rows [n], sampled [n] or [n, k] with placeholders."""
        mine = self.active[rows]
        if not mine.any():
            return
        assert self.output_counts is not None
        index = self._to_device(rows[mine])
        chosen = sampled[self._to_device(np.flatnonzero(mine))]
        if chosen.ndim == 1:
            self.output_counts[index, chosen] += 1
            return
        where = (index.unsqueeze(1).expand_as(chosen), chosen.clamp(min=0))
        is_token = (chosen != PLACEHOLDER_TOKEN_ID).to(torch.int32)
        self.output_counts.index_put_(where, is_token, accumulate=True)

    def apply(
        self, logits: Tensor, rows: np.ndarray, drafts: SpecDecodeMetadata | None = None
    ) -> None:
        """Penalise logits [n, vocab] of the rows, in place.

        drafts: those of the batch whose logits these are; they count as generated.
        """
        places = np.flatnonzero(self.active[rows])
        if not len(places):
            return
        assert self.output_counts is not None
        index = rows[places]
        table_rows = self._to_device(index)
        counts, prompt_mask = self.output_counts, self.prompt_mask
        if drafts is not None:
            counts, prompt_mask = counts[table_rows], prompt_mask[table_rows]
            tokens, before = drafts.drafts_before(places)
            before = before & (tokens != PLACEHOLDER_TOKEN_ID)
            counts.scatter_add_(1, tokens.clamp(min=0), before.to(torch.int32))
            table_rows = torch.arange(len(places), device=logits.device)
        self.apply_penalties(
            logits,
            self._to_device(places),
            table_rows,
            self._to_device(self.presence[index]),
            self._to_device(self.frequency[index]),
            self._to_device(self.repetition[index]),
            counts,
            prompt_mask,
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.states.device)
