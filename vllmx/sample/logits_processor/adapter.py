# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/logits_processor/__init__.py, builtin.py @ v0.25.0
"""Logits processors of single requests, as one of the whole batch."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from vllmx.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)
from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

T = TypeVar("T")
RequestLogitsProcessor = Callable[..., Tensor]
"""Output token ids and logits [vocab], or prompt token ids before them, to logits [vocab]."""


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep a dict from place to state up to date with the batch; whether it has changed.

    new_state: makes the state of a new request; None for one that needs none.
    """
    if batch_update is None:
        return False
    changed = False
    for place in batch_update.removed:
        changed |= req_entries.pop(place, None) is not None
    for place, params, prompt_ids, output_ids in batch_update.added:
        state = new_state(params, prompt_ids, output_ids)
        changed |= req_entries.pop(place, None) is not None or state is not None
        if state is not None:
            req_entries[place] = state
    for first, second, how in batch_update.moved:
        coming, going = req_entries.pop(first, None), req_entries.pop(second, None)
        if coming is not None:
            req_entries[second] = coming
        if going is not None and how is MoveDirectionality.SWAP:
            req_entries[first] = going
        changed |= coming is not None or going is not None
    return changed


class AdapterLogitsProcessor(LogitsProcessor):
    """Derive from this, with `is_argmax_invariant` and `new_req_logits_processor`, to process the
    logits of those requests that ask for it (by `extra_args`, say)."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        """A subclass that overrides this calls it."""
        self.req_info: dict[int, partial[Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The processor of a new request; None for a request without."""
        raise NotImplementedError

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> partial[Tensor] | None:
        processor = self.new_req_logits_processor(params)
        if processor is None:
            return None
        if len(inspect.signature(processor).parameters) < 3:
            return partial(processor, output_ids)
        if prompt_ids is None:
            raise ValueError(
                "Prompt token ids are required for this logits processor but were not provided."
            )
        return partial(processor, prompt_ids, output_ids)

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """See LogitsProcessor."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: Tensor) -> Tensor:
        """See LogitsProcessor."""
        for place, processor in self.req_info.items():
            row = logits[place]
            changed = processor(row)
            if changed is not row:
                logits[place] = changed
        return logits
