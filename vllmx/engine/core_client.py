# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core_client.py @ v0.25.0
"""How a front end talks to the engine core: in the same call, in a thread, or in a process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllmx.engine import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    PauseMode,
)
from vllmx.engine.core import EngineCore
from vllmx.engine.executor import Executor
from vllmx.engine.mailbox import AsyncMailbox, dead_error
from vllmx.exceptions import EngineDeadError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.engine.mp_client import AsyncMPClient

# Loaded when they are asked for: sockets and processes are not needed in process.
_PAUSE_S = 0.0005
"""How long a step that found nothing to do leaves the machine to others."""
_ELSEWHERE = {
    "AsyncThreadClient": "vllmx.engine.thread_client",
    "MPClient": "vllmx.engine.mp_client",
    "SyncMPClient": "vllmx.engine.mp_client",
    "AsyncMPClient": "vllmx.engine.mp_client",
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
        """AsyncMPClient or SyncMPClient; in this process AsyncThreadClient or InprocClient."""
        if multiprocess_mode and asyncio_mode:
            return EngineCoreClient.make_async_mp_client(vllm_config, executor_class, log_stats)
        if multiprocess_mode:
            from vllmx.engine.mp_client import SyncMPClient

            return SyncMPClient(vllm_config, executor_class, log_stats)
        if asyncio_mode:
            from vllmx.engine.thread_client import AsyncThreadClient

            return AsyncThreadClient(vllm_config, executor_class, log_stats)
        return InprocClient(vllm_config, executor_class, log_stats)

    @staticmethod
    def make_async_mp_client(
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        while_starting: Callable[[], None] | None = None,
    ) -> AsyncMPClient:
        """A client of an engine core in a process of its own, for asyncio.

        `while_starting` is called once while the engine loads.
        """
        from vllmx.engine.mp_client import AsyncMPClient

        return AsyncMPClient(vllm_config, executor_class, log_stats, while_starting)

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine core; with a `timeout` requests in flight get that many seconds."""


class SyncEngineCoreClient(EngineCoreClient):
    """What LLMEngine asks of its client."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs:
        """What the next step brought; EngineDeadError where there will be none."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""

    @abstractmethod
    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored."""

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""

    @abstractmethod
    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""


class AsyncEngineCoreClient(EngineCoreClient):
    """What AsyncLLM asks of its client.

    One loop at a time may wait for outputs. If the engine core dies, everybody who waits, and
    everybody who comes later, gets EngineDeadError with the cause.
    """

    def __init__(self) -> None:
        self._mailbox = AsyncMailbox()
        self._call_ids = itertools.count()

    @abstractmethod
    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        """Send a message to the engine core; EngineDeadError if nobody will answer it."""

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        return not self._mailbox.closed

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What a caller would get now, None while the engine lives."""
        return dead_error(self._mailbox.cause) if self._mailbox.closed else None

    async def get_output_async(self) -> EngineCoreOutputs:
        """The outputs of the next step that has any; EngineDeadError when there will be none."""
        return await self._mailbox.get()

    @abstractmethod
    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored, and so is a dead engine."""
        if request_ids and self.is_alive:
            with contextlib.suppress(EngineDeadError):
                self._post(EngineCoreRequestType.ABORT, list(request_ids))

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core between two steps and wait for its result."""
        self._mailbox.bind()
        call_id = next(self._call_ids)
        call = asyncio.get_running_loop().create_future()
        self._mailbox.calls[call_id] = call
        try:
            self._post(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
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

    async def shutdown_async(self, timeout: float | None = None) -> None:
        """Same as `shutdown`, while the running loop goes on delivering outputs."""
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown, timeout)


class InprocClient(SyncEngineCoreClient):
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
            outputs, executed = self.engine_core.step_fn()
            if not executed and not any(output.outputs for output in outputs.values()):
                # What waits does so for another thread, which is to have its turn.
                time.sleep(_PAUSE_S)
        except BaseException as error:
            self._alive, self._failure = False, error
            if not isinstance(error, Exception):
                self.engine_core.start_over()
                self._alive, self._failure = True, None
            raise
        return outputs.get(0) or EngineCoreOutputs()

    def _ensure_alive(self) -> None:
        if not self._alive:
            raise dead_error(self._failure)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        self._ensure_alive()
        self.engine_core.add_request(*self.engine_core.preprocess_add_request(request))

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
