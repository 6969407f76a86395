# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/penalties.py @ v0.25.0
"""Presence, frequency and repetition penalties."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.sampling_params import SamplingParams
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState


class PenaltiesState:
    """Counts of each row's generated tokens and which tokens its prompt has.

    The tables, [max_num_reqs, vocab], are made when the first request with a penalty arrives.
    """

    def __init__(self, states: RequestState) -> None:
        self.states = states
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
        """Count the tokens just sampled; rows, sampled: [n]."""
        mine = self.active[rows]
        if not mine.any():
            return
        assert self.output_counts is not None
        index = to_device(rows[mine], self.states.device)
        chosen = sampled[to_device(np.flatnonzero(mine), self.states.device)]
        self.output_counts[index, chosen] += 1

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Penalise logits [n, vocab] of the rows, in place."""
        places = np.flatnonzero(self.active[rows])
        if not len(places):
            return
        assert self.output_counts is not None
        device = self.states.device
        index = to_device(rows[places], device)
        place = to_device(places, device)
        counts, in_prompt = self.output_counts[index], self.prompt_mask[index]
        part = logits[place]
        repetition = self._column(self.repetition, rows[places])
        factor = torch.where(part > 0, 1 / repetition, repetition)
        part = torch.where(in_prompt | (counts > 0), part * factor, part)
        part -= self._column(self.frequency, rows[places]) * counts
        part -= self._column(self.presence, rows[places]) * (counts > 0)
        logits[place] = part

    def _column(self, values: np.ndarray, rows: np.ndarray) -> Tensor:
        return to_device(values[rows], self.states.device).unsqueeze(1)
