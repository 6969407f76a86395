# SPDX-License-Identifier: Apache-2.0
"""The engine core in a thread of this process, for an asyncio front end."""

from __future__ import annotations

import logging
import threading
import weakref
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from vllmx.engine import EngineCoreRequest, EngineCoreRequestType
from vllmx.engine.core_client import AsyncEngineCoreClient
from vllmx.engine.core_loop import EngineCoreLoop
from vllmx.engine.executor import Executor
from vllmx.engine.mailbox import AsyncMailbox

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)


def _run_engine(
    vllm_config: VllmConfig,
    executor_class: type[Executor],
    log_stats: bool,
    mailbox: AsyncMailbox,
    started: Future[EngineCoreLoop],
) -> None:
    """Life of the engine's thread."""
    try:
        engine_core = EngineCoreLoop(vllm_config, executor_class, log_stats, mailbox.send)
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


def _stop_engine(engine_core: EngineCoreLoop, thread: threading.Thread) -> None:
    engine_core.request_shutdown()
    thread.join(timeout=5.0)


class AsyncThreadClient(AsyncEngineCoreClient):
    """Runs the engine core's loop in a thread; upstream has a process for that (AsyncMPClient)."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        """Returns once the engine is ready; what fails its start is raised here."""
        super().__init__()
        started: Future[EngineCoreLoop] = Future()
        self._thread = threading.Thread(
            target=_run_engine,
            args=(vllm_config, executor_class, log_stats, self._mailbox, started),
            name="EngineCore",
            daemon=True,
        )
        self._thread.start()
        self.engine_core = started.result()
        self._finalizer = weakref.finalize(self, _stop_engine, self.engine_core, self._thread)

    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        self.engine_core.input_queue.put((request_type, payload))
        # Asked afterwards: an engine that closes now still answers what it finds in the queue.
        self._mailbox.ensure_open()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        self._mailbox.bind()
        prepared, _ = self.engine_core.preprocess_add_request(request)
        self._post(EngineCoreRequestType.ADD, prepared)

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine: requests in flight get `timeout` seconds (None: none), then they are
        aborted. Blocks; in the loop that serves those requests use `shutdown_async`."""
        self._finalizer.detach()
        self.engine_core.request_shutdown(timeout or 0.0)
        self._thread.join()
