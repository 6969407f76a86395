# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/structured_outputs.py @ v0.25.0
"""What grammars forbid, taken out of a step's logits before anything is sampled from them."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.core.output import GrammarOutput
from vllmx.worker.buffer_utils import PackedBuffer
from vllmx.worker.input_batch import InputBatch


class StructuredOutputsWorker:
    """Applies the bitmasks of the steps on one device; its buffers are made with the first one."""

    def __init__(self, max_num_reqs: int, vocab_size: int, device: str) -> None:
        self.max_num_reqs = max_num_reqs
        self.num_words = -(-vocab_size // 32)
        self.device = device
        self._buffer: PackedBuffer | None = None

    def apply_grammar_bitmask(
        self, logits: Tensor, batch: InputBatch, grammar_output: GrammarOutput
    ) -> np.ndarray:
        """Set what the grammars forbid to minus infinity, in place; the rows that have a grammar.

        logits: [number of batch.sample_reqs, vocab], a row for each of those requests in order;
        returned: int32 [m].
        """
        row_of = {batch.req_ids[i]: row for row, i in enumerate(batch.sample_reqs.tolist())}
        bitmask = grammar_output.grammar_bitmask
        ids = grammar_output.structured_output_request_ids
        assert len(ids) == len(bitmask), "a mask for each constrained request"
        rows = np.fromiter((row_of[req_id] for req_id in ids), np.int32, len(ids))
        if self.device == "cpu":
            forbid(logits, bitmask, rows)
            return rows
        from vllmx.kernels.triton_bitmask import apply_grammar_bitmask

        rows_on_device, mask_on_device = self._send(rows, bitmask)
        apply_grammar_bitmask(logits, mask_on_device, rows_on_device)
        return rows

    def _send(self, rows: np.ndarray, bitmask: np.ndarray) -> tuple[Tensor, Tensor]:
        """The same on the device: rows [m] and masks [m, words], int32. Nobody waits."""
        if self._buffer is None:
            size = self.max_num_reqs * (1 + self.num_words)
            self._buffer = PackedBuffer(size, self.device)
        count, words = bitmask.shape
        used = count * (1 + words)
        host = self._buffer.next()
        host[:count] = rows
        host[count:used] = bitmask.reshape(-1)
        self._buffer.send(used)
        return self._buffer.gpu[:count], self._buffer.gpu[count:used].view(count, words)


def forbid(logits: Tensor, bitmask: np.ndarray, rows: np.ndarray) -> None:
    """Set to minus infinity what `bitmask` forbids, in place, on a CPU.

    logits: [n, vocab]; bitmask: int32 [m, ceil(vocab / 32)]; rows [m]: the row of each mask.
    """
    bits = np.unpackbits(~bitmask.view(np.uint8), axis=1, bitorder="little")
    forbidden = torch.from_numpy(bits[:, : logits.shape[1]]).view(torch.bool)
    if len(rows) == len(logits) and (rows == np.arange(len(rows))).all():
        logits.masked_fill_(forbidden, float("-inf"))
        return
    index = torch.from_numpy(rows.astype(np.int64))
    logits[index] = logits[index].masked_fill(forbidden, float("-inf"))
