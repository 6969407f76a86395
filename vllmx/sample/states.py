# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/states.py @ v0.25.0
"""Temperature, top-k, top-p, min-p, seed and number of logprobs of each request row."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from vllmx.sample.min_p import apply_min_p
from vllmx.sampling_params import SamplingParams
from vllmx.worker.buffer_utils import to_device

NO_LOGPROBS = -1
ALL_LOGPROBS = -2


class SamplingStates:
    """One value a row; a batch takes the rows it needs."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: str) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.temperature = np.zeros(max_num_reqs, dtype=np.float32)
        self.top_k = np.full(max_num_reqs, vocab_size, dtype=np.int64)
        self.top_p = np.ones(max_num_reqs, dtype=np.float32)
        self.min_p = np.zeros(max_num_reqs, dtype=np.float32)
        self.seeds = np.zeros(max_num_reqs, dtype=np.int64)
        self.has_seed = np.zeros(max_num_reqs, dtype=np.bool_)
        self.num_logprobs = np.full(max_num_reqs, NO_LOGPROBS, dtype=np.int64)

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Take over a request's parameters."""
        self.temperature[row] = params.temperature
        limited = 0 < params.top_k < self.vocab_size
        self.top_k[row] = params.top_k if limited else self.vocab_size
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.has_seed[row] = params.seed is not None
        # Any integer is a seed; its low 64 bits count.
        self.seeds[row] = np.uint64((params.seed or 0) % (1 << 64)).astype(np.int64)
        wanted = params.num_logprobs
        self.num_logprobs[row] = NO_LOGPROBS if wanted is None else wanted
        if wanted == -1:
            self.num_logprobs[row] = ALL_LOGPROBS

    def max_num_logprobs(self, rows: np.ndarray) -> int:
        """Most logprobs any of the rows wants; NO_LOGPROBS if none wants any."""
        wanted = self.num_logprobs[rows]
        if (wanted == ALL_LOGPROBS).any():
            return self.vocab_size
        return int(wanted.max(initial=NO_LOGPROBS))

    def apply_temperature(self, logits: Tensor, rows: np.ndarray) -> None:
        """Divide each row of logits by its temperature, in place; greedy rows stay."""
        temperature = self.temperature[rows]
        if ((temperature == 0) | (temperature == 1)).all():
            return
        divisor = np.where(temperature == 0, np.float32(1), temperature)
        logits.div_(to_device(divisor, self.device).unsqueeze(1))

    def apply_filters(
        self,
        logits: Tensor,
        rows: np.ndarray,
        apply_top_k_top_p: Callable[[Tensor, Tensor | None, Tensor | None], Tensor],
    ) -> Tensor:
        """min-p, top-k and top-p where rows have them, in place."""
        min_p, top_k, top_p = self.min_p[rows], self.top_k[rows], self.top_p[rows]
        if min_p.any():
            apply_min_p(logits, to_device(min_p, self.device))
        any_k, any_p = (top_k < self.vocab_size).any(), (top_p < 1).any()
        if not (any_k or any_p):
            return logits
        return apply_top_k_top_p(
            logits,
            to_device(top_k, self.device) if any_k else None,
            to_device(top_p, self.device) if any_p else None,
        )

    def gather(self, rows: np.ndarray) -> tuple[Tensor, Tensor, Tensor]:
        """(temperature, seeds, has_seed) of the rows, as tensors."""
        return (
            to_device(self.temperature[rows], self.device),
            to_device(self.seeds[rows], self.device),
            to_device(self.has_seed[rows], self.device),
        )


def random_generator(seed: int, device: str) -> torch.Generator:
    """The engine's generator, for requests without a seed of their own."""
    return torch.Generator(device=device).manual_seed(seed)
