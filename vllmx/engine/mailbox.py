# SPDX-License-Identifier: Apache-2.0
"""Outputs and answers of an engine core on their way from another thread to who waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from concurrent.futures import Future
from typing import Any

from vllmx.engine import EngineCoreOutputs, UtilityOutput
from vllmx.exceptions import EngineDeadError


def dead_error(cause: BaseException | str | None) -> EngineDeadError:
    """A fresh error for each caller, so that none sees another's traceback.

    cause: what failed, in words where it did so in another process; None after a shutdown.
    """
    if cause is None:
        return EngineDeadError("The engine core has been shut down.")
    words = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
    error = EngineDeadError(f"The engine core is dead: {words}")
    error.__cause__ = RuntimeError(words) if isinstance(cause, str) else cause
    return error


class Mailbox(ABC):
    """Where the thread that hears from an engine leaves what it has heard.

    That thread holds this object and never the client, so that a forgotten client can be
    collected. `calls`: utility calls that wait for their answer, by id.
    """

    calls: dict[int, Any]

    def __init__(self) -> None:
        self.calls = {}
        self.closed = False
        self.cause: BaseException | str | None = None

    @abstractmethod
    def send(self, client_index: int, outputs: EngineCoreOutputs | None) -> None:
        """Pass outputs on, or None as the last of them. For the engine's thread."""

    def close(self, cause: BaseException | str | None) -> None:
        """Nothing comes any more: wake up everybody who waits. For the engine's thread."""
        self.cause = cause
        self.closed = True
        self.send(0, None)

    def ensure_open(self) -> None:
        """Raise EngineDeadError if nothing comes any more."""
        if self.closed:
            raise dead_error(self.cause)

    def _answer(self, answer: UtilityOutput) -> None:
        call = self.calls.pop(answer.call_id, None)
        if call is None or call.done():
            return  # the caller was cancelled
        if answer.failure_message is not None:
            call.set_exception(RuntimeError(answer.failure_message))
        else:
            call.set_result(None if answer.result is None else answer.result.result)

    def _fail_calls(self) -> None:
        # A caller that has seen `closed` may take its own call out meanwhile.
        for call_id in list(self.calls):
            call = self.calls.pop(call_id, None)
            if call is not None and not call.done():
                call.set_exception(dead_error(self.cause))


class AsyncMailbox(Mailbox):
    """Delivers to an event loop.

    Outputs are kept until a loop takes them: none may be known yet, or the one that is may have
    stopped and be followed by another.
    """

    calls: dict[int, asyncio.Future[Any]]

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: deque[EngineCoreOutputs | None] = deque()
        self.queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()

    def bind(self) -> None:
        """Deliver to the running loop from now on, beginning with what has been kept."""
        loop = asyncio.get_running_loop()
        if loop is self._loop:
            return
        unread, self.queue = self.queue, asyncio.Queue()
        while not unread.empty():
            self.queue.put_nowait(unread.get_nowait())
        self._loop = loop
        self._take_backlog()

    def send(self, client_index: int, outputs: EngineCoreOutputs | None) -> None:
        """Pass outputs on, or None as the last of them. For the engine's thread."""
        with self._lock:
            self._backlog.append(outputs)
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has been closed: the next one takes them
                self._loop.call_soon_threadsafe(self._take_backlog)

    async def get(self) -> EngineCoreOutputs:
        """The next outputs; EngineDeadError when there are no more, and for whoever waits then."""
        self.bind()
        outputs = await self.queue.get()
        if outputs is None:
            self.queue.put_nowait(None)
            raise dead_error(self.cause)
        return outputs

    def _take_backlog(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            return  # called for a loop that another one has followed
        with self._lock:
            backlog, self._backlog = self._backlog, deque()
        for outputs in backlog:
            self._deliver(outputs)

    def _deliver(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            self._fail_calls()
            self.queue.put_nowait(None)
        elif outputs.utility_output is None:
            self.queue.put_nowait(outputs)
        else:
            self._answer(outputs.utility_output)


class SyncMailbox(Mailbox):
    """Delivers to threads that block."""

    calls: dict[int, Future[Any]]

    def __init__(self) -> None:
        super().__init__()
        self._queue: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()

    def send(self, client_index: int, outputs: EngineCoreOutputs | None) -> None:
        """Pass outputs on, or None as the last of them. For the engine's thread."""
        if outputs is not None and outputs.utility_output is not None:
            self._answer(outputs.utility_output)
            return
        if outputs is None:
            self._fail_calls()
        self._queue.put(outputs)

    def get(self) -> EngineCoreOutputs:
        """The next outputs; EngineDeadError when there are no more, and for whoever waits then."""
        outputs = self._queue.get()
        if outputs is None:
            self._queue.put(None)
            raise dead_error(self.cause)
        return outputs
