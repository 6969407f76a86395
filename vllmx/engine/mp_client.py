# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core_client.py @ v0.25.0
"""Clients of an engine core in a process of its own. None of them needs torch.

A thread reads what the engine sends and watches its process, so that its death is known at once;
messages to it are sent by whoever has them.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from vllmx.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    PauseMode,
)
from vllmx.engine.core import EngineCore
from vllmx.engine.core_client import (
    AsyncEngineCoreClient,
    EngineCoreClient,
    SyncEngineCoreClient,
)
from vllmx.engine.core_proc import EngineCoreProc
from vllmx.engine.executor import Executor
from vllmx.engine.mailbox import Mailbox, SyncMailbox
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.engine.startup import resolve_scheduler_limits
from vllmx.engine.utils import (
    EXIT_GRACE_S,
    SHUTDOWN_GRACE_S,
    CoreEngineProcManager,
    EngineZmqAddresses,
    launch_core_engines,
    make_ipc_folder,
    make_zmq_socket,
    remove_ipc_folder,
    run_before_children_are_joined,
    wait_for_first_message,
)
from vllmx.exceptions import EngineDeadError, VLLMValidationError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)

_LAST_OUTPUTS_MS = 100  # for outputs of a dead process that are still on their way

NO_ANSWER = -1
"""Id of a utility call whose answer nobody waits for."""


class BackgroundResources:
    """What a client has to give back, without a reference to the client.

    Called, it ends the engine at once.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.folder: Path | None = None
        self.ctx: zmq.Context[Any] = zmq.Context()
        self.engine_manager: CoreEngineProcManager | None = None
        self.input_socket: zmq.Socket[Any] | None = None
        self.output_socket: zmq.Socket[Any] | None = None
        self.output_thread: threading.Thread | None = None
        self.core_engine = b""
        # A socket is for one thread at a time.
        self.send_lock = threading.Lock()
        self._close_lock = threading.Lock()

    @property
    def engine_dead(self) -> bool:
        """Whether nothing more comes from the engine."""
        return self.mailbox.closed

    def __call__(self) -> None:
        self.close(0.0, EXIT_GRACE_S)

    def send(self, message: Sequence[Any]) -> None:
        """Send a message to the engine; it is dropped where the sockets are closed."""
        with self.send_lock:
            if self.input_socket is not None:
                self.input_socket.send_multipart([self.core_engine, *message], copy=False)

    def close(self, timeout: float, grace: float) -> None:
        """End the engine: requests in flight get `timeout` seconds, then it has `grace` seconds to
        end itself before it is killed. Closes everything; harmless when that has been done."""
        if self.output_thread is not None and not self.engine_dead:
            call = (0, NO_ANSWER, "request_shutdown", (timeout,))
            message = MsgpackEncoder().encode(call)
            self.send([EngineCoreRequestType.UTILITY.value, *message])
        with self._close_lock:
            if self.output_thread is not None:
                # It ends with the engine's last message.
                self.output_thread.join(None if math.isinf(timeout) else timeout + grace)
            if self.engine_manager is not None:
                self.engine_manager.shutdown(grace if self.engine_dead else 0.0)
            if self.output_thread is not None:
                self.output_thread.join()
            elif self.output_socket is not None:
                self.output_socket.close(linger=0)
            with self.send_lock:
                if self.input_socket is not None:
                    self.input_socket.close(linger=0)
                    self.input_socket = None
            self.mailbox.closed = True
            self.ctx.term()
            if self.folder is not None:
                remove_ipc_folder(self.folder)


def _receive(resources: BackgroundResources, decoder: MsgpackDecoder) -> None:
    """Life of the thread that reads: outputs go to the mailbox, which is closed at the end."""
    mailbox, manager, socket = (
        resources.mailbox,
        resources.engine_manager,
        resources.output_socket,
    )
    assert manager is not None and socket is not None
    poller = zmq.Poller()
    for source in (socket, *manager.sentinels()):
        poller.register(source, zmq.POLLIN)
    cause: BaseException | str | None = None
    try:
        while True:
            if all(source is not socket for source, _ in poller.poll()) and not socket.poll(
                _LAST_OUTPUTS_MS
            ):
                cause = manager.describe_exit()
                break
            frames = socket.recv_multipart(copy=False)
            if frames[0].buffer == EngineCoreProc.ENGINE_CORE_DEAD:
                cause = bytes(frames[1].buffer).decode() or None
                break
            mailbox.send(0, decoder.decode(frames))
    except Exception as error:
        logger.exception("The engine core's outputs cannot be read.")
        cause = error
    finally:
        if cause is not None and not manager.manager_stopped.is_set():
            logger.error("The engine core is dead: %s", cause)
        mailbox.close(cause)
        socket.close(linger=0)


class MPClient(EngineCoreClient):
    """Starts an engine core in a process and exchanges messages with it over ipc sockets."""

    def __init__(
        self,
        asyncio_mode: bool,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        mailbox: Mailbox,
        while_starting: Callable[[], None] | None = None,
    ) -> None:
        """Returns once the engine is ready, and has called `while_starting` before that.

        What fails the engine's start is raised here: a UserError as such, anything else as
        RuntimeError.
        """
        self.asyncio_mode = asyncio_mode
        self.vllm_config = vllm_config
        resolve_scheduler_limits(vllm_config)
        self.resources = BackgroundResources(mailbox)
        self._finalizer = weakref.finalize(self, self.resources)
        run_before_children_are_joined(self._finalizer, priority=20)
        allow_pickle = vllm_config.parallel_config.allow_insecure_serialization
        self.encoder = MsgpackEncoder(allow_pickle=allow_pickle)
        self.decoder = MsgpackDecoder(EngineCoreOutputs, allow_pickle=allow_pickle)
        try:
            self._launch(executor_class, log_stats, while_starting or (lambda: None))
        except BaseException:
            self._finalizer()
            raise

    def _launch(
        self,
        executor_class: type[Executor],
        log_stats: bool,
        while_starting: Callable[[], None],
    ) -> None:
        resources = self.resources
        resources.folder = folder = make_ipc_folder()
        names = ("input", "output", "handshake")
        input_path, output_path, handshake = (f"ipc://{folder / name}" for name in names)
        resources.input_socket = make_zmq_socket(resources.ctx, input_path, zmq.ROUTER)
        resources.output_socket = make_zmq_socket(resources.ctx, output_path, zmq.PULL)
        addresses = EngineZmqAddresses(inputs=[input_path], outputs=[output_path])
        with launch_core_engines(
            self.vllm_config, executor_class, log_stats, addresses, handshake
        ) as manager:
            resources.engine_manager = manager
            while_starting()
        wait_for_first_message(resources.input_socket, manager)
        resources.core_engine, payload = resources.input_socket.recv_multipart()
        self._apply_ready_response(payload)
        resources.output_thread = threading.Thread(
            target=_receive,
            args=(resources, self.decoder),
            name="EngineCoreOutputQueueThread",
            daemon=True,
        )
        resources.output_thread.start()

    def _apply_ready_response(self, payload: bytes) -> None:
        """Take over what the engine has filled in of its copy of the config."""
        if not payload:
            return
        response = msgspec.msgpack.decode(payload, type=EngineCoreReadyResponse)
        model_config, cache_config = self.vllm_config.model_config, self.vllm_config.cache_config
        limits = (model_config.max_model_len, response.max_model_len)
        model_config.max_model_len = min(limit for limit in limits if limit is not None)
        sizes = ("num_gpu_blocks", "block_size", "kv_cache_size_tokens", "kv_cache_max_concurrency")
        for name in sizes:
            setattr(cache_config, name, getattr(response, name))

    def ensure_alive(self) -> None:
        """Raise EngineDeadError if the engine cannot serve any more."""
        self.resources.mailbox.ensure_open()

    def _post(self, request_type: EngineCoreRequestType, payload: Any) -> None:
        """Send a message to the engine core; EngineDeadError if nobody will answer it.

        VLLMValidationError for numbers, texts and depths that no message can hold.
        """
        self.ensure_alive()
        try:
            buffers = self.encoder.encode(payload)
        except (OverflowError, UnicodeError, RecursionError) as error:
            raise VLLMValidationError(
                f"The request cannot be sent to the engine's process: {error}. Leave out integers "
                "beyond 64 bits, text that is no valid Unicode, and very deep nesting."
            ) from error
        self.resources.send([request_type.value, *buffers])
        # Who registered as waiting while the engine died has been passed over.
        self.ensure_alive()

    def shutdown(self, timeout: float | None = None) -> None:
        """End the engine: requests in flight get `timeout` seconds (None: none), then they are
        aborted. Blocks; in the loop that serves those requests use `shutdown_async`."""
        self._finalizer.detach()
        self.resources.close(timeout or 0.0, SHUTDOWN_GRACE_S)


class SyncMPClient(MPClient, SyncEngineCoreClient):
    """For callers that block, one thread of them."""

    def __init__(
        self, vllm_config: VllmConfig, executor_class: type[Executor], log_stats: bool
    ) -> None:
        """Returns once the engine is ready; what fails its start is raised here."""
        self._mailbox = SyncMailbox()
        self._call_ids = itertools.count()
        super().__init__(False, vllm_config, executor_class, log_stats, self._mailbox)

    def get_output(self) -> EngineCoreOutputs:
        """What the next step brought; EngineDeadError where there will be none."""
        return self._mailbox.get()

    def call_utility(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core between two steps and wait for its result.

        RuntimeError with the error's text where the method fails.
        """
        call_id = next(self._call_ids)
        call: Future[Any] = Future()
        self._mailbox.calls[call_id] = call
        try:
            self._post(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
            return call.result()
        finally:
            self._mailbox.calls.pop(call_id, None)

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        EngineCore.check_request(request)
        self._post(EngineCoreRequestType.ADD, request)

    def abort_requests(self, request_ids: list[str]) -> None:
        """End requests at once; unknown ids are ignored, and so is a dead engine."""
        if request_ids and not self.resources.engine_dead:
            with contextlib.suppress(EngineDeadError):
                self._post(EngineCoreRequestType.ABORT, request_ids)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks."""
        return self.call_utility("reset_prefix_cache", reset_running_requests, reset_connector)

    def pause_scheduler(self, mode: PauseMode = "abort", clear_cache: bool = True) -> None:
        """Stop scheduling; returns when the requests in flight are dealt with as `mode` says."""
        self.call_utility("pause_scheduler", mode, clear_cache)

    def resume_scheduler(self) -> None:
        """Go on after a pause."""
        self.call_utility("resume_scheduler")

    def is_scheduler_paused(self) -> bool:
        """Whether anything is paused."""
        return self.call_utility("is_scheduler_paused")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker by name; a function needs
        parallel.allow_insecure_serialization."""
        return self.call_utility("collective_rpc", method, timeout, args, kwargs)


class AsyncMPClient(MPClient, AsyncEngineCoreClient):
    """For an event loop."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        while_starting: Callable[[], None] | None = None,
    ) -> None:
        """Returns once the engine is ready; what fails its start is raised here."""
        AsyncEngineCoreClient.__init__(self)
        super().__init__(
            True, vllm_config, executor_class, log_stats, self._mailbox, while_starting
        )

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        """Queue a request; ValueError for what the engine does not do."""
        self._mailbox.bind()
        EngineCore.check_request(request)
        self._post(EngineCoreRequestType.ADD, request)
