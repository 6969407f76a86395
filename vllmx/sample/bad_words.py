# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/bad_words.py @ v0.25.0
"""Words that must not be generated."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.sample.packed_rows import PackedRows
from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode.metadata import SpecDecodeMetadata
from vllmx.worker.buffer_utils import to_device
from vllmx.worker.states import RequestState

ANYTHING = -2
"""Stands before a word that is shorter than others, and fits what was generated there."""
NOTHING = -1
"""Stands where nothing was generated, and fits no word."""


class BadWordsState:
    """Token sequences by row; a sequence's last token is excluded once the rest was generated."""

    def __init__(self, states: RequestState) -> None:
        self.states = states
        self.words = PackedRows(states.max_num_reqs, states.device)

    @property
    def active(self) -> np.ndarray:
        """Whether a row has words, bool [max_num_reqs]."""
        return self.words.active

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's words."""
        words = params.bad_words_token_ids
        if not words:
            self.words.set(row, None)
            return
        longest = max(map(len, words))
        table = np.full((len(words), longest), ANYTHING, dtype=np.int64)
        for i, word in enumerate(words):
            table[i, longest - len(word) :] = word
        self.words.set(row, table)

    def apply(
        self, logits: Tensor, rows: np.ndarray, drafts: SpecDecodeMetadata | None = None
    ) -> None:
        """Exclude, in place, the tokens that would complete a word; logits: [n, vocab].

        drafts: those of the batch whose logits these are; they count as generated.
        """
        packed = self.words.pack(rows, fill=ANYTHING)
        if packed is None:
            return
        words, places = packed.values, packed.places
        beginnings, last = words[:, :-1], words[:, -1]
        generated = self._generated(rows, beginnings.shape[1], drafts)[places]
        met = ((beginnings == ANYTHING) | (beginnings == generated)).all(dim=1)
        excluded = torch.where(met, float("-inf"), 0.0).to(logits.dtype)
        # Two words may have the same last token: both count, so they are added.
        logits.index_put_((places, last), excluded, accumulate=True)

    def _generated(self, rows: np.ndarray, count: int, drafts: SpecDecodeMetadata | None) -> Tensor:
        """The last `count` tokens that each row generated, int64 [n, count]."""
        states = self.states
        index = to_device(rows.astype(np.int64), states.device).unsqueeze(1)
        prompt_len = to_device(states.prompt_len[rows].astype(np.int64), states.device)
        total_len = to_device(states.total_len[rows], states.device)
        back = torch.arange(-count, 0, device=states.device)
        if drafts is not None:
            back = back + to_device(drafts.local_pos, states.device).unsqueeze(1)
        positions = total_len.unsqueeze(1) + back
        # A draft's position may lie beyond the longest row.
        columns = positions.clamp(min=0, max=states.max_model_len - 1)
        tokens = states.all_token_ids.gpu[index, columns]
        if drafts is not None and drafts.max_spec_len:
            drafted = drafts.draft_token_ids[to_device(drafts.requests, states.device)]
            drafted = drafted.gather(1, back.clamp(min=0, max=drafts.max_spec_len - 1))
            tokens = torch.where(back >= 0, drafted, tokens.long())
        return torch.where(positions >= prompt_len.unsqueeze(1), tokens.long(), NOTHING)
