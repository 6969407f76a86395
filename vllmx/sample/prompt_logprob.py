# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/prompt_logprob.py @ v0.25.0
"""Log-probabilities of the prompt's own tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor

from vllmx.core.output import LogprobsLists
from vllmx.sample.logprob import compute_topk_logprobs
from vllmx.sample.ops import SamplerOps
from vllmx.worker.input_batch import InputBatch
from vllmx.worker.states import RequestState

ROWS_AT_ONCE = 256
"""Positions whose logits are held at once; a long prompt over a large vocabulary is gigabytes."""


class PromptLogprobsWorker:
    """Collects them chunk by chunk and hands them over when the prompt is complete.

    `ops` are the sampler's, so that a prompt is scored by the kernels that score what is sampled.
    """

    def __init__(self, states: RequestState, ops: SamplerOps) -> None:
        self.states = states
        self.token_values = ops.token_logprobs
        self.wanted: dict[str, int] = {}
        self.chunks: dict[str, list[LogprobsLists]] = {}

    def add_request(self, req_id: str, num_prompt_logprobs: int | None) -> None:
        """Remember what the request asked for. One that resumes after its prompt asks no more."""
        self.remove_request(req_id)
        row = self.states.req_id_to_index[req_id]
        if num_prompt_logprobs is None or (
            self.states.prefill_len[row] > self.states.prompt_len[row]
        ):
            return
        count = num_prompt_logprobs if num_prompt_logprobs >= 0 else self.states.vocab_size
        self.wanted[req_id] = count
        self.chunks[req_id] = []

    def remove_request(self, req_id: str) -> None:
        """Forget a request."""
        self.wanted.pop(req_id, None)
        self.chunks.pop(req_id, None)

    def compute(
        self, compute_logits: Callable[[Tensor], Tensor], hidden: Tensor, batch: InputBatch
    ) -> dict[str, LogprobsLists | None]:
        """Use this step's hidden states [num_tokens, H]; returns the prompts now complete.

        Position p of a result belongs to prompt token p + 1.
        """
        done: dict[str, LogprobsLists | None] = {}
        if not self.wanted:
            return done
        for i, req_id in enumerate(batch.req_ids):
            count = self.wanted.get(req_id)
            if count is None:
                continue
            row = int(batch.idx_mapping_np[i])
            prompt_len = int(self.states.prompt_len[row])
            first = int(batch.seq_lens_np[i] - batch.num_scheduled_tokens[i])
            last = min(int(batch.seq_lens_np[i]), prompt_len - 1)
            start = int(batch.query_start_loc_np[i])
            for begin in range(first, last, ROWS_AT_ONCE):
                end = min(begin + ROWS_AT_ONCE, last)
                rows = hidden[start + begin - first : start + end - first]
                targets = self.states.all_token_ids.gpu[row, begin + 1 : end + 1].long()
                logits = compute_logits(rows)
                self.chunks[req_id].append(
                    compute_topk_logprobs(logits, count, targets, self.token_values)
                )
            if int(batch.seq_lens_np[i]) >= prompt_len:
                done[req_id] = _join(self.chunks[req_id], count)
                self.remove_request(req_id)
        return done


def _join(chunks: list[LogprobsLists], count: int) -> LogprobsLists:
    if not chunks:
        shape = (0, count + 1)
        return LogprobsLists(
            np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.zeros(0, np.int32)
        )
    return LogprobsLists(
        np.concatenate([c.logprob_token_ids for c in chunks]),
        np.concatenate([c.logprobs for c in chunks]),
        np.concatenate([c.sampled_token_ranks for c in chunks]),
    )
