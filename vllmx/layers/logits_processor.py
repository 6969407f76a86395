# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/logits_processor.py @ v0.25.0
"""From hidden states to logits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vllmx.ir.row_by_row import row_by_row
from vllmx.layers.vocab_parallel_embedding import ParallelLMHead


class LogitsProcessor(nn.Module):
    """Head, then scale and soft cap where the model has them."""

    def __init__(
        self, scale: float = 1.0, soft_cap: float | None = None, batch_invariant: bool = False
    ) -> None:
        super().__init__()
        self.scale = scale
        self.soft_cap = soft_cap
        # Where torch shares elements between threads or vectors end, its tanh may differ in a bit.
        self.cap = row_by_row(_capped, "logits") if batch_invariant else _capped

    def forward(self, lm_head: ParallelLMHead, hidden_states: Tensor) -> Tensor:
        """hidden_states: [num_rows, hidden] -> logits [num_rows, vocab]."""
        logits = lm_head(hidden_states)
        if self.soft_cap is not None:
            logits = self.cap(logits, self.soft_cap)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits


def _capped(logits: Tensor, soft_cap: float) -> Tensor:
    return soft_cap * torch.tanh(logits / soft_cap)
