# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core_client.py @ v0.25.0
"""How a front end talks to the engine core: in the same call, or to a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllmx.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    PauseMode,
)
from vllmx.engine.core import EngineCore
from vllmx.engine.core_proc import EngineCoreProc
from vllmx.engine.executor import Executor
from vllmx.exceptions import EngineDeadError, UserError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)


def _dead(cause: BaseException | None) -> EngineDeadError:
    """A fresh error for each caller, so that none sees another's traceback."""
    if cause is None:
        return EngineDeadError("The engine core has been shut down.")
    error = EngineDeadError(f"The engine core is dead: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


class EngineCoreClient(ABC):
    """What a front end holds of an engine core, wherever that runs."""

    @staticmethod
    def make_client(
        multiprocess_mode: bool,
        asyncio_mode: bool,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
    ) -> EngineCoreClient:
        """AsyncThreadClient in asyncio mode, else InprocClient; there is no process client."""
        if multiprocess_mode:
            raise UserError("The engine core runs in this process; multiprocess_mode is not built.")
        client_class = AsyncThreadClient if asyncio_mode else InprocClient
        return client_class(vllm_config, executor_class, log_stats)

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core; with a `timeout` requests in flight get that many seconds."""


class InprocClient(EngineCoreClient):
    """Calls the engine core directly; `get_output` is one step."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        self.engine_core = EngineCore(vllm_config, executor_class, log_stats)
        self._alive = True
        self._failure: BaseException | None = None

    def get_output(self) -> EngineCoreOutputs:
        """Step the engine core and return what came out.

        If a step fails, so does every later call: the scheduler and the model no longer agree.
        An interrupted one (Ctrl-C) ends all requests, without outputs, and empties the caches.
        """
        self._ensure_alive()
        try:
            outputs, _ = self.engine_core.step_fn()
        except BaseException as error:
            self._alive, self._failure = False, error
            if not isinstance(error, Exception):
                self.engine_core.start_over()
                self._alive, self._failure = True, None
            raise
        return outputs.get(0) or EngineCoreOutputs()

    def _ensure_alive(self) -> None:
        if not self._alive:
            raise _dead(self._failure)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        self._ensure_alive()
        self.engine_core.add_request(self.engine_core.preprocess_add_request(request))

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored."""
        if request_ids:
            self.engine_core.abort_requests(request_ids)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return self.engine_core.reset_prefix_cache(reset_running_requests, reset_connector)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        return self.engine_core.collective_rpc(method, timeout, args, kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the workers; there is nobody to wait for."""
        self._alive = False
        self.engine_core.shutdown()


class _Mailbox:
    """Outputs on their way from the engine's thread to an event loop.

    They are kept until a loop takes them: none may be known yet, or the one that is may have
    stopped and be followed by another. The engine's thread holds this object and never the client,
    so that a forgotten client can be collected.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._backlog: deque[EngineCoreOutputs | None] = deque()
        self.queue: asyncio.Queue[EngineCoreOutputs | None] = asyncio.Queue()
        self.calls: dict[int, asyncio.Future[Any]] = {}
        self.closed = False
        self.cause: BaseException | None = None

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

    def _take_backlog(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            return  # called for a loop that another one has followed
        with self._lock:
            backlog, self._backlog = self._backlog, deque()
        for outputs in backlog:
            self._deliver(outputs)

    def _deliver(self, outputs: EngineCoreOutputs | None) -> None:
        if outputs is None:
            for call in self.calls.values():
                if not call.done():
                    call.set_exception(_dead(self.cause))
            self.calls.clear()
            self.queue.put_nowait(None)
        elif outputs.utility_output is None:
            self.queue.put_nowait(outputs)
        else:
            answer = outputs.utility_output
            waiter = self.calls.pop(answer.call_id, None)
            if waiter is None or waiter.done():
                return  # the caller was cancelled
            if answer.failure_message is None:
                waiter.set_result(answer.result)
            else:
                waiter.set_exception(RuntimeError(answer.failure_message))

    def close(self, cause: BaseException | None) -> None:
        """Nothing comes any more: wake up everybody who waits. For the engine's thread."""
        self.cause = cause
        self.closed = True
        self.send(0, None)


def _run_engine(
    vllm_config: VllmConfig,
    executor_class: type[Executor],
    log_stats: bool,
    mailbox: _Mailbox,
    started: Future[EngineCoreProc],
) -> None:
    """Life of the engine's thread."""
    try:
        engine_core = EngineCoreProc(vllm_config, executor_class, log_stats, mailbox.send)
    except BaseException as error:
        started.set_exception(error)
        return
    started.set_result(engine_core)
    cause: BaseException | None = None
    try:
        engine_core.run_busy_loop()
    except BaseException as error:
        logger.exception("The engine core failed.")
        cause = error
    # From here on a client that puts a message sees `closed`; what it put before is answered now.
    mailbox.cause, mailbox.closed = cause, True
    if cause is None:
        engine_core.refuse_messages()
    mailbox.close(cause)
    try:
        engine_core.shutdown()
    except Exception:
        logger.exception("The engine core could not be shut down cleanly.")


def _stop_engine(engine_core: EngineCoreProc, thread: threading.Thread) -> None:
    engine_core.request_shutdown()
    thread.join(timeout=5.0)


class AsyncThreadClient(EngineCoreClient):
    """The engine core in a thread of its own, for an asyncio front end.

    Its shape is that of upstream's AsyncMPClient. One loop at a time may wait for outputs. If the
    engine core dies, everybody who waits, and everybody who comes later, gets EngineDeadError with
    the cause.
    """

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        """Returns once the engine is ready; what fails its start is raised here."""
        self._mailbox = _Mailbox()
        self._call_ids = itertools.count()
        started: Future[EngineCoreProc] = Future()
        self._thread = threading.Thread(
            target=_run_engine,
            args=(vllm_config, executor_class, log_stats, self._mailbox, started),
            name="EngineCore",
            daemon=True,
        )
        self._thread.start()
        self.engine_core = started.result()
        self._finalizer = weakref.finalize(self, _stop_engine, self.engine_core, self._thread)

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return not self._mailbox.closed

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What a caller would get now, None while the engine lives."""
        return _dead(self._mailbox.cause) if self._mailbox.closed else None

    def _put(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        self.engine_core.input_queue.put((request_type, payload))
        # Asked afterwards: an engine that closes now still answers what it finds in the queue.
        if self._mailbox.closed:
            raise _dead(self._mailbox.cause)

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs of the next step that has any; EngineDeadError when there will be none."""
        self._mailbox.bind()
        outputs = await self._mailbox.queue.get()
        if outputs is None:
            self._mailbox.queue.put_nowait(None)  # for whoever waits besides
            raise _dead(self._mailbox.cause)
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        self._mailbox.bind()
        prepared = self.engine_core.preprocess_add_request(request)
        self._put(EngineCoreRequestType.ADD, prepared)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored, and so is a dead engine."""
        if request_ids and self.is_alive:
            self.engine_core.input_queue.put((EngineCoreRequestType.ABORT, list(request_ids)))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core between two steps and wait for its result."""
        self._mailbox.bind()
        call_id = next(self._call_ids)
        call = asyncio.get_running_loop().create_future()
        self._mailbox.calls[call_id] = call
        try:
            self._put(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
            return await call
        finally:
            self._mailbox.calls.pop(call_id, None)

    async def reset_prefix_cache_async(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return await self.call_utility_async(
            "reset_prefix_cache", reset_running_requests, reset_connector
        )

    async def pause_scheduler_async(
        self, mode: PauseMode = "abort", clear_cache: bool = True
    ) -> None:
        """Stop scheduling; returns when the requests in flight are dealt with as `mode` says."""
        await self.call_utility_async("pause_scheduler", mode, clear_cache)

    async def resume_scheduler_async(self) -> None:
        """Go on after a pause."""
        await self.call_utility_async("resume_scheduler")

    async def is_scheduler_paused_async(self) -> bool:
        """Whether anything is paused."""
        return await self.call_utility_async("is_scheduler_paused")

    async def collective_rpc_async(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        return await self.call_utility_async("collective_rpc", method, timeout, args, kwargs)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine: requests in flight get `timeout` seconds (None: none), then they are
        aborted. Blocks; in the loop that serves those requests use `shutdown_async`."""
        self._finalizer.detach()
        self.engine_core.request_shutdown(timeout or 0.0)
        self._thread.join()

    async def shutdown_async(self, timeout: float | None = None) -> None:
        """Same as `shutdown`, while the running loop goes on delivering outputs."""
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown, timeout)
