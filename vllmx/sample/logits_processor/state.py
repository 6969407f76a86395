# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/logits_processor/state.py @ v0.25.0
"""The processors of an engine, and the changes of a batch on their way to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain

from vllmx.sample.logits_processor.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MovedRequest,
    RemovedRequest,
)


class BatchUpdateBuilder:
    """Collects the changes of one step.

    All removals of a step come before the first look at them, and `pop_removed` gives the lowest
    free place.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._removed = removed or []
        self.added = added or []
        self.moved = moved or []
        self._is_removed_sorted = False
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Free places, the lowest last."""
        if not self._is_removed_sorted:
            self._removed.sort(reverse=True)
            self._is_removed_sorted = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Note that a place has become free. RuntimeError after the first look."""
        if self._is_removed_sorted:
            raise RuntimeError(
                "Cannot register new removed request after self.removed has been read."
            )
        self._removed.append(index)
        self.batch_changed = True

    def has_removed(self) -> bool:
        """Whether a place is free."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest free place; None without any."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """The lowest free place, which is then no longer free; None without any."""
        return self.removed.pop() if self._removed else None

    def reset(self) -> bool:
        """Forget the changes; whether a request was removed, or the batch was marked as changed."""
        self._removed.clear()
        self.added.clear()
        self.moved.clear()
        changed, self.batch_changed, self._is_removed_sorted = self.batch_changed, False, False
        return changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The changes so far, of a batch that has `batch_size` requests; None for none."""
        self._is_removed_sorted = self.batch_changed = False
        if not (self._removed or self.added or self.moved):
            return None
        update = BatchUpdate(batch_size, removed=self._removed, added=self.added, moved=self.moved)
        self._removed, self.added, self.moved = [], [], []
        return update


class LogitsProcessors:
    """Processors, by whether they may change which token is the likeliest."""

    def __init__(self, logitsprocs: Iterable[LogitsProcessor] | None = None) -> None:
        self.argmax_invariant: list[LogitsProcessor] = []
        self.non_argmax_invariant: list[LogitsProcessor] = []
        for processor in logitsprocs or ():
            invariant = processor.is_argmax_invariant()
            (self.argmax_invariant if invariant else self.non_argmax_invariant).append(processor)

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every processor."""
        return chain(self.argmax_invariant, self.non_argmax_invariant)
