# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/logits_processor/interface.py @ v0.25.0
"""What a custom logits processor is, and what it is told of the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from torch import Tensor, device

from vllmx.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllmx.config import VllmConfig


class MoveDirectionality(Enum):
    """How a request's place in the batch changes."""

    UNIDIRECTIONAL = auto()
    """The request of the first place goes to the second, which is free or is given up."""
    SWAP = auto()
    """Two requests change places."""


RemovedRequest = int
"""The place that a request had."""
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
"""(place, parameters, prompt token ids, output token ids); the last list is kept up to date."""
MovedRequest = tuple[int, int, MoveDirectionality]
"""(place, place, how)."""


@dataclass(frozen=True)
class BatchUpdate:
    """What changed in the batch: removed first, then added, then moved.

    A place that is added to or moved to may have been another request's.
    """

    batch_size: int
    """Requests in the batch now."""
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class LogitsProcessor(ABC):
    """Changes the logits of a whole batch before tokens are chosen."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters of a request that this processor can't use."""
        return None

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, device: device, is_pin_memory: bool) -> None:
        """Made once by each worker."""
        raise NotImplementedError

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """The logits [batch_size, vocab] float32, changed in place or anew."""
        raise NotImplementedError

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token always stays so. Asked once; such processors work after the
        temperature, the others before penalties and temperature."""
        raise NotImplementedError

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before every `apply`; None where the batch is still the same."""
        raise NotImplementedError
