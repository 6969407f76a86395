# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/states.py @ v0.25.0
"""What a worker remembers of each running request: one row from admission to its end."""

from __future__ import annotations

import numpy as np
import torch

from vllmx.worker.buffer_utils import StagedWriteTensor


class RequestState:
    """Rows of requests. A row is not moved while its request lives; a batch gathers rows.

    prompt_len: tokens the user gave; prefill_len: tokens present when the request was (re)admitted,
    longer than the prompt after a preemption; total_len: all tokens known, sampled ones included.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, vocab_size: int, device: str) -> None:
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.device = device
        self.req_id_to_index: dict[str, int] = {}
        self.free_indices = list(range(max_num_reqs - 1, -1, -1))
        self.all_token_ids = StagedWriteTensor((max_num_reqs, max_model_len), torch.int32, device)
        self.prompt_len = np.zeros(max_num_reqs, dtype=np.int32)
        self.prefill_len = np.zeros(max_num_reqs, dtype=np.int32)
        self.total_len = np.zeros(max_num_reqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_reqs, dtype=np.int64)
        # How often a row was given away: what comes late knows whether it is still meant.
        self.generation = np.zeros(max_num_reqs, dtype=np.int64)

    def reset(self) -> None:
        """Forget all requests; the tensors stay where they are."""
        self.req_id_to_index.clear()
        self.free_indices = list(range(self.max_num_reqs - 1, -1, -1))
        self.all_token_ids.clear()
        self.generation += 1

    @property
    def num_reqs(self) -> int:
        """Number of rows in use."""
        return len(self.req_id_to_index)

    def add_request(
        self, req_id: str, prompt_len: int, all_token_ids: list[int], num_computed_tokens: int
    ) -> int:
        """Give the request a row and return its index."""
        assert self.free_indices, "more requests than max_num_seqs"
        row = self.free_indices.pop()
        self.req_id_to_index[req_id] = row
        self.prompt_len[row] = prompt_len
        self.prefill_len[row] = self.total_len[row] = len(all_token_ids)
        self.num_computed_tokens[row] = num_computed_tokens
        self.generation[row] += 1
        self.all_token_ids.stage_write(row, 0, all_token_ids)
        return row

    def remove_request(self, req_id: str) -> int | None:
        """Free the request's row and return it; None for a request that has none."""
        row = self.req_id_to_index.pop(req_id, None)
        if row is not None:
            self.free_indices.append(row)
        return row
