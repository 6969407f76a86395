# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/bad_words.py @ v0.25.0
"""Words that must not be generated."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState


class BadWordsState:
    """Token sequences by row; a sequence's last token is excluded once the rest was generated."""

    def __init__(self, states: RequestState) -> None:
        self.states = states
        self.active = np.zeros(states.max_num_reqs, dtype=np.bool_)
        self.words: dict[int, list[list[int]]] = {}

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's words."""
        self.words.pop(row, None)
        self.active[row] = bool(params.bad_words_token_ids)
        if params.bad_words_token_ids:
            self.words[row] = params.bad_words_token_ids

    def apply(self, logits: Tensor, rows: np.ndarray) -> None:
        """Exclude, in place, the tokens that would complete a word; logits: [n, vocab]."""
        for i in np.flatnonzero(self.active[rows]).tolist():
            row = int(rows[i])
            start, end = int(self.states.prompt_len[row]), int(self.states.total_len[row])
            generated = self.states.all_token_ids.np[row, start:end]
            banned = [
                word[-1]
                for word in self.words[row]
                if len(word) - 1 <= len(generated)
                and generated[len(generated) - len(word) + 1 :].tolist() == word[:-1]
            ]
            if banned:
                logits[i, banned] = float("-inf")
