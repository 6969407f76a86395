# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu_input_batch.py @ v0.25.0
"""Custom logits processors among the sampler's states."""

from __future__ import annotations

from weakref import WeakValueDictionary

import numpy as np
from torch import Tensor

from vllmx.sample.logits_processor.interface import LogitsProcessor, MoveDirectionality
from vllmx.sample.logits_processor.state import BatchUpdateBuilder, LogitsProcessors
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState


class OutputTokens(list[int]):
    """The tokens that a request has generated; unlike a plain list it can be held weakly."""


class CustomProcessorsState:
    """Keeps, for processors, a dense batch of the requests that live: each has a place from its
    admission on and moves only when an earlier place has become free.

    A step's logits are brought into that order. Requests that get no token in a step have logits
    of zero, which are thrown away.
    """

    def __init__(self, states: RequestState, processors: LogitsProcessors) -> None:
        self.states = states
        self.processors = processors
        self.rows: list[int] = []
        self.place_of = np.full(states.max_num_reqs, -1, dtype=np.int64)
        # A list that no processor keeps is gone after its step, and costs later steps nothing.
        self.outputs: WeakValueDictionary[int, OutputTokens] = WeakValueDictionary()
        self._builder = BatchUpdateBuilder()
        self._gone: list[int] = []
        self._new: dict[int, SamplingParams] = {}

    @property
    def present(self) -> bool:
        """Whether there is any processor."""
        return any(True for _ in self.processors.all)

    def add_request(self, row: int, params: SamplingParams) -> None:
        """Admit a request; the processors hear of it in the next step that samples."""
        self.remove_request(row)
        self._new[row] = params

    def remove_request(self, row: int) -> None:
        """Let a request go."""
        if self._new.pop(row, None) is None and self.place_of[row] >= 0 and row not in self._gone:
            self._gone.append(row)

    def update_state(self) -> None:
        """Tell the processors what has changed and bring the output tokens up to date."""
        builder, rows = self._builder, self.rows
        for row in self._gone:
            builder.removed_append(int(self.place_of[row]))
            self.place_of[row] = -1
            self.outputs.pop(row, None)
        for row, params in self._new.items():
            place = builder.pop_removed()
            if place is None:
                place = len(rows)
                rows.append(row)
            rows[place], self.place_of[row] = row, place
            self.outputs[row] = output = OutputTokens()
            prompt = self.states.all_token_ids.np[row, : self.states.prompt_len[row]].tolist()
            builder.added.append((place, params, prompt, output))
        self._gone.clear()
        self._new.clear()
        self._close_gaps()
        for row, output in self.outputs.items():
            start = int(self.states.prompt_len[row]) + len(output)
            end = int(self.states.total_len[row])
            output.extend(self.states.all_token_ids.np[row, start:end].tolist())
        update = builder.get_and_reset(len(rows))
        for processor in self.processors.all:
            processor.update_state(update)

    def _close_gaps(self) -> None:
        free = self._builder.removed
        ends = set(free)
        while free:
            last = len(self.rows) - 1
            if last in ends:
                self.rows.pop()
            elif free[-1] < last:
                place = free.pop()
                ends.discard(place)
                self.rows[place] = row = self.rows.pop()
                self.place_of[row] = place
                how = MoveDirectionality.UNIDIRECTIONAL
                self._builder.moved.append((last, place, how))
            else:
                return

    def apply(self, processors: list[LogitsProcessor], logits: Tensor, rows: np.ndarray) -> Tensor:
        """The logits [n, vocab] float32 of the rows after some of the processors."""
        if not processors:
            return logits
        places = self.place_of[rows]
        in_order = len(places) == len(self.rows) and bool((places == np.arange(len(places))).all())
        batch = logits
        if not in_order:
            batch = logits.new_zeros((len(self.rows), logits.shape[1]))
            batch[places] = logits
        for processor in processors:
            batch = processor.apply(batch)
        return batch if in_order else batch[places]
