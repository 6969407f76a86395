# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core.py @ v0.25.0
"""The engine core with a loop of its own: messages come in on a queue, outputs go to a callback.

core_proc.py puts sockets and a process around it, thread_client.py a thread.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from vllmx.core.interface import PauseState
from vllmx.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequestType,
    FinishReason,
    PauseMode,
    UtilityOutput,
    UtilityResult,
)
from vllmx.engine.core import EngineCore
from vllmx.engine.executor import Executor
from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)


class EngineShutdownState(IntEnum):
    """How far the shutdown is."""

    RUNNING = 0
    REQUESTED = 1
    SHUTTING_DOWN = 2


class EngineCoreLoop(EngineCore):
    """Takes (EngineCoreRequestType, payload) from `input_queue` and calls `send_outputs`.

    Payloads: ADD a Request, ABORT a list of ids, UTILITY (client index, call id, method name,
    arguments), EXECUTOR_FAILED what ends the loop with an error, WAKEUP anything. All methods but
    `request_shutdown` and `preprocess_add_request` belong to the loop's thread.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        send_outputs: Callable[[int, EngineCoreOutputs], None],
    ) -> None:
        """`send_outputs(client_index, outputs)` is called from the loop's thread."""
        self.input_queue: queue.SimpleQueue[tuple[EngineCoreRequestType, Any]] = queue.SimpleQueue()
        self._send_outputs = send_outputs
        # A message that was read in the middle of a step and has to wait for its end.
        self._held_back: tuple[EngineCoreRequestType, Any] | None = None
        self._idle_state_callbacks: list[Callable[[EngineCore], None]] = []
        self.shutdown_state = EngineShutdownState.RUNNING
        self._shutdown_timeout = 0.0
        self._drain_deadline = 0.0
        super().__init__(vllm_config, executor_class, log_stats)

    # ------------------------------------------------------------------ loop

    def run_busy_loop(self) -> None:
        """Serve until a shutdown is asked for and done."""
        while self._handle_shutdown():
            self._process_input_queue()
            self._process_engine_step()

    def has_work(self) -> bool:
        """Whether a step is due."""
        return self.scheduler.has_requests() or bool(self.batch_queue)

    def is_running(self) -> bool:
        """Whether no shutdown has been asked for."""
        return self.shutdown_state == EngineShutdownState.RUNNING

    def _process_input_queue(self) -> None:
        """Take in all messages; wait for one if there is nothing else to do."""
        while not self.has_work() and self.is_running():
            while self._idle_state_callbacks:
                self._idle_state_callbacks.pop()(self)
            self._handle_client_request(*self._next_message(block=True))
        while (message := self._next_message(block=False)) is not None:
            self._handle_client_request(*message)

    def _next_message(self, block: bool) -> Any:
        if self._held_back is not None:
            message, self._held_back = self._held_back, None
            return message
        try:
            return self.input_queue.get(block)
        except queue.Empty:
            return None

    def _process_engine_step(self) -> None:
        outputs, progress = self.step_fn()
        for client_index, client_outputs in outputs.items():
            self._send_outputs(client_index, client_outputs)
            progress |= bool(client_outputs.outputs)
        if not progress and self.scheduler.has_unfinished_requests():
            # They wait for something outside; let other threads get on with it.
            time.sleep(0.001)

    def _process_aborts_queue(self) -> None:
        if request_ids := self._aborts_at_the_head():
            self.abort_requests(request_ids)

    def _aborts_at_the_head(self) -> list[str]:
        """Take the aborts that come next in the queue; an abort costs a walk over all requests, so
        those of many clients that leave at once are made one.

        What comes behind another message may be meant for a request that this message adds.
        """
        request_ids: list[str] = []
        while self._held_back is None and (message := self._next_message(block=False)) is not None:
            if message[0] == EngineCoreRequestType.ABORT:
                request_ids.extend(message[1])
            else:
                self._held_back = message
        return request_ids

    # ------------------------------------------------------------------ messages

    def _handle_client_request(self, request_type: EngineCoreRequestType, request: Any) -> None:
        if request_type == EngineCoreRequestType.ADD:
            if self.is_running():
                self._add_or_refuse(request)
            else:
                self._send_finished([(request.request_id, request.client_index)])
        elif request_type == EngineCoreRequestType.ABORT:
            self.abort_requests([*request, *self._aborts_at_the_head()])
        elif request_type == EngineCoreRequestType.UTILITY:
            self._handle_utility(*request)
        elif request_type == EngineCoreRequestType.EXECUTOR_FAILED:
            raise RuntimeError(request or "Executor failed.")
        else:
            assert request_type == EngineCoreRequestType.WAKEUP, request_type

    def _add_or_refuse(self, request: Request) -> None:
        """A request that can't be added fails alone."""
        try:
            self.add_request(request)
        except (TypeError, ValueError):
            logger.exception("Request %s was refused", request.request_id)
            failed = [(request.request_id, request.client_index)]
            self._send_finished(failed, FinishReason.ERROR)

    def _handle_utility(
        self, client_index: int, call_id: int, name: str, args: tuple[Any, ...]
    ) -> None:
        """Call a method by name and send its result, which may be a Future of one."""

        def send(result: Any = None, failure: str | None = None) -> None:
            output = UtilityOutput(call_id, failure, None if failure else UtilityResult(result))
            self._send_outputs(client_index, EngineCoreOutputs(utility_output=output))

        def send_result_of(call: Callable[[], Any]) -> None:
            try:
                result = call()
            except Exception as error:
                logger.exception("Utility call %s failed", name)
                send(failure=f"Call to {name} method failed: {error}")
                return
            if isinstance(result, Future):
                result.add_done_callback(lambda future: send_result_of(future.result))
            else:
                send(result)

        # Asked for again, with another timeout, it may hurry on what is under way.
        if not self.is_running() and name != "request_shutdown":
            send(failure="Server shutting down")
            return
        send_result_of(lambda: getattr(self, name)(*args))

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> Any:
        """Stop scheduling: end the requests in flight (abort), let them finish (wait) or freeze
        them (keep). Returns a Future if that takes further steps."""
        if mode not in ("keep", "abort", "wait"):
            raise ValueError(f"Invalid pause mode: {mode}")
        if mode == "abort":
            self._abort_all()
        self.scheduler.set_pause_state(
            PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW
        )
        future: Future[None] = Future()

        def when_idle(engine: EngineCore) -> None:
            if clear_cache:
                engine.reset_prefix_cache(reset_running_requests=True)
            future.set_result(None)

        if self.has_work():
            self._idle_state_callbacks.append(when_idle)
            return future
        when_idle(self)
        return None

    # ------------------------------------------------------------------ end

    def request_shutdown(self, timeout: float = 0.0) -> None:
        """Ask the loop to end: running requests get `timeout` seconds, then they are aborted.

        May be called from any thread, and again with another timeout.
        """
        self._shutdown_timeout = timeout
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.input_queue.put((EngineCoreRequestType.WAKEUP, None))

    def _handle_shutdown(self) -> bool:
        """Whether the loop should go on."""
        if self.is_running():
            return True
        if self.shutdown_state == EngineShutdownState.REQUESTED:
            self.shutdown_state = EngineShutdownState.SHUTTING_DOWN
            self._drain_deadline = time.monotonic() + self._shutdown_timeout
        # A paused scheduler would never get its requests done.
        if self.has_work() and time.monotonic() < self._drain_deadline:
            return True
        self._abort_all()
        return self.has_work()

    def refuse_messages(self) -> None:
        """Answer what is left in the input queue; for after the loop."""
        while (message := self._next_message(block=False)) is not None:
            self._handle_client_request(*message)

    def _abort_all(self) -> None:
        self._send_finished(self.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))

    def _send_finished(
        self, requests: list[tuple[str, int]], reason: FinishReason = FinishReason.ABORT
    ) -> None:
        """Tell the clients of requests that ended without a step."""
        by_client: defaultdict[int, list[str]] = defaultdict(list)
        for request_id, client_index in requests:
            by_client[client_index].append(request_id)
        for client_index, request_ids in by_client.items():
            outputs = [EngineCoreOutput(req_id, [], finish_reason=reason) for req_id in request_ids]
            self._send_outputs(
                client_index,
                EngineCoreOutputs(outputs=outputs, finished_requests=set(request_ids)),
            )
