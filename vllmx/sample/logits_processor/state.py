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

    All removals of a step come before the first look at them, which closes the list; from then on
    it is sorted, and only `pop_removed` takes from it.
    """

    def __init__(
        self,
        removed: list[RemovedRequest] | None = None,
        added: list[AddedRequest] | None = None,
        moved: list[MovedRequest] | None = None,
    ) -> None:
        self._free: list[RemovedRequest] = [] if removed is None else removed
        self.added: list[AddedRequest] = [] if added is None else added
        self.moved: list[MovedRequest] = [] if moved is None else moved
        self._open = True
        self.batch_changed = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """Free places, the lowest last."""
        if self._open:
            self._open = False
            self._free.sort(reverse=True)
        return self._free

    def removed_append(self, index: int) -> None:
        """Note that a place has become free. RuntimeError after the first look."""
        if not self._open:
            raise RuntimeError(
                f"Cannot register new removed request after self.removed has been read: {index}."
            )
        self.batch_changed = True
        self._free.append(index)

    def has_removed(self) -> bool:
        """Whether a place is free."""
        return len(self._free) > 0

    def peek_removed(self) -> int | None:
        """The lowest free place; None without any, which is no look."""
        return next(reversed(self.removed)) if self._free else None

    def pop_removed(self) -> int | None:
        """The lowest free place, which is then no longer free; None without any."""
        lowest = self.peek_removed()
        if lowest is not None:
            del self._free[-1]
        return lowest

    def reset(self) -> bool:
        """Forget the changes; whether a request was removed, or the batch was marked as changed."""
        for changes in (self._free, self.added, self.moved):
            changes.clear()
        was_changed = self.batch_changed
        self._open, self.batch_changed = True, False
        return was_changed

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """The changes so far, of a batch that has `batch_size` requests; None for none."""
        self._open, self.batch_changed = True, False
        free, added, moved = self._free, self.added, self.moved
        if not len(free) + len(added) + len(moved):
            return None
        # The lists go with the update: the next step has its own.
        self._free, self.added, self.moved = [], [], []
        return BatchUpdate(batch_size=batch_size, removed=free, added=added, moved=moved)


class LogitsProcessors:
    """Processors, by whether they may change which token is the likeliest."""

    def __init__(self, logitsprocs: Iterable[LogitsProcessor] | None = None) -> None:
        told = [(processor.is_argmax_invariant(), processor) for processor in logitsprocs or ()]
        self.argmax_invariant = [processor for keeps, processor in told if keeps]
        self.non_argmax_invariant = [processor for keeps, processor in told if not keeps]

    @property
    def all(self) -> Iterator[LogitsProcessor]:
        """Every processor."""
        return chain(self.argmax_invariant, self.non_argmax_invariant)
