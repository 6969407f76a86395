# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/logit_bias.py @ v0.25.0
"""Allowed tokens, logit biases, and no end before min_tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllmx.sampling_params import SamplingParams


@dataclass
class LogitBias:
    """One request's rules. min_len: prompt plus min_tokens, before which `stops` are excluded."""

    allowed: Tensor | None
    bias_ids: Tensor | None
    biases: Tensor | None
    stops: Tensor | None
    min_len: int


class LogitBiasState:
    """Rules by row; rows without any cost nothing."""

    def __init__(self, max_num_reqs: int, device: str) -> None:
        self.device = device
        self.active = np.zeros(max_num_reqs, dtype=np.bool_)
        self.rules: dict[int, LogitBias] = {}

    def add_request(self, row: int, prompt_len: int, params: SamplingParams) -> None:
        """Take over a request's rules."""
        self.rules.pop(row, None)
        stops = params.all_stop_token_ids if params.min_tokens else None
        self.active[row] = bool(params.allowed_token_ids or params.logit_bias or stops)
        if not self.active[row]:
            return
        bias = params.logit_bias
        self.rules[row] = LogitBias(
            allowed=self._ids(params.allowed_token_ids),
            bias_ids=self._ids(bias),
            biases=torch.tensor(list(bias.values()), device=self.device) if bias else None,
            stops=self._ids(stops),
            min_len=prompt_len + params.min_tokens,
        )

    def apply(self, logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> None:
        """Change logits [n, vocab] in place; positions [n]: of each row's last token."""
        for i in np.flatnonzero(self.active[rows]).tolist():
            rule, row = self.rules[int(rows[i])], logits[i]
            if rule.allowed is not None:
                kept = row[rule.allowed]
                row.fill_(float("-inf"))
                row[rule.allowed] = kept
            if rule.bias_ids is not None and rule.biases is not None:
                row[rule.bias_ids] += rule.biases
            # The token to come is number positions[i] + 1, counted from 0.
            if rule.stops is not None and positions[i] + 1 < rule.min_len:
                row[rule.stops] = float("-inf")

    def _ids(self, ids: object) -> Tensor | None:
        return torch.tensor(list(ids), device=self.device) if ids else None  # type: ignore[call-overload]
