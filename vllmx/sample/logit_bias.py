# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/logit_bias.py @ v0.25.0
"""Allowed tokens, logit biases, and no end before min_tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from vllmx.sample.packed_rows import PackedRows
from vllmx.sampling_params import SamplingParams
from vllmx.worker.buffer_utils import to_device


class LogitBiasState:
    """Rules by row; rows without any cost nothing."""

    def __init__(self, max_num_reqs: int, device: str) -> None:
        self.device = device
        self.active = np.zeros(max_num_reqs, dtype=np.bool_)
        self.allowed = PackedRows(max_num_reqs, device)
        self.bias_ids = PackedRows(max_num_reqs, device)
        self.biases = PackedRows(max_num_reqs, device)
        self.stops = PackedRows(max_num_reqs, device)
        # Prompt plus min_tokens: up to this length the tokens in `stops` are excluded.
        self.min_len = np.zeros(max_num_reqs, dtype=np.int64)

    def add_request(self, row: int, prompt_len: int, params: SamplingParams) -> None:
        """Take over a request's rules."""
        bias = params.logit_bias or {}
        stops = params.all_stop_token_ids if params.min_tokens else ()
        self.allowed.set(row, _ids(params.allowed_token_ids or ()))
        self.bias_ids.set(row, _ids(bias))
        self.biases.set(row, np.array(list(bias.values()), dtype=np.float32))
        self.stops.set(row, _ids(stops))
        self.min_len[row] = prompt_len + params.min_tokens
        self.active[row] = bool(params.allowed_token_ids or bias or stops)

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Change logits [n, vocab] in place; positions [n]: of each row's last token."""
        if not self.active[rows].any():
            return
        allowed = self.allowed.pack(rows)
        if allowed is not None:
            where = (allowed.places, allowed.values)
            kept = logits[where]
            limited = to_device(self.allowed.active[rows], self.device).unsqueeze(1)
            logits.masked_fill_(limited, float("-inf"))
            logits[where] = kept
        bias_ids, biases = self.bias_ids.pack(rows), self.biases.pack(rows)
        if bias_ids is not None and biases is not None:
            where = (bias_ids.places, bias_ids.values)
            logits[where] = logits[where] + biases.values
        stops = self.stops.pack(rows)
        if stops is not None:
            # The token to come is number positions[i] + 1, counted from 0.
            early = to_device(positions + 1 < self.min_len[rows], self.device)
            where = (stops.places, stops.values)
            logits[where] = torch.where(early[stops.places], float("-inf"), logits[where])


def _ids(token_ids: Iterable[int]) -> np.ndarray:
    return np.array(list(token_ids), dtype=np.int64)
