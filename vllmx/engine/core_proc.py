# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/core.py @ v0.25.0
"""The engine core in a process of its own: sockets around its loop, and the life of the process.

Two threads do the sockets' work, so that messages are read and written while a step runs. The
process ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import pickle
import queue
import signal
import threading
import urllib.parse
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import connection, parent_process
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
import zmq

from vllmx.engine import (
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllmx.engine.core_loop import EngineCoreLoop
from vllmx.engine.executor import Executor
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.engine.utils import (
    EngineHandshakeMetadata,
    EngineZmqAddresses,
    describe_startup_error,
    make_zmq_socket,
    remove_ipc_folder,
)
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import ParallelConfig, VllmConfig

logger = logging.getLogger(__name__)

LOG_FORMAT = "%(levelname)s %(name)s: %(message)s"
HANDSHAKE_TIMEOUT_S = 300
"""Seconds that a front end has to answer HELLO."""
LINGER_MS = 4000
"""Milliseconds for the last outputs to be sent."""
PARENT_CHECK_S = 1.0
"""Seconds between two looks at who the parent is."""


class EngineCoreProc(EngineCoreLoop):
    """An engine core that talks to its front ends over ZMQ.

    ENGINE_CORE_DEAD is the last message to each of them: two frames, the second with what went
    wrong, empty after a shutdown.
    """

    ENGINE_CORE_DEAD = b"ENGINE_CORE_DEAD"
    addresses: EngineZmqAddresses

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_client: bool,
        handshake_address: str,
        executor_class: type[Executor],
        log_stats: bool,
        *,
        engine_index: int = 0,
    ) -> None:
        """Greets the front end at `handshake_address`, loads the model, and says that it is ready.

        local_client: whether the front end is on this machine. UserError as for EngineCore; it is
        told to the front end as well.
        """
        self.engine_index = engine_index
        self.output_queue: queue.SimpleQueue[tuple[int, EngineCoreOutputs] | list[bytes]]
        self.output_queue = queue.SimpleQueue()
        self._allow_pickle = vllm_config.parallel_config.allow_insecure_serialization
        self._input_ctx: zmq.Context[Any] = zmq.Context()
        identity = engine_index.to_bytes(2, "little")
        with self._perform_handshake(
            handshake_address, identity, local_client, vllm_config.parallel_config
        ) as addresses:
            super().__init__(vllm_config, executor_class, log_stats, self._queue_outputs)
            self.addresses = addresses
            ready = threading.Event()
            self.input_thread = threading.Thread(
                target=self.process_input_sockets,
                args=(addresses.inputs, identity, ready),
                name="EngineCoreInput",
                daemon=True,
            )
            self.output_thread = threading.Thread(
                target=self.process_output_sockets,
                args=(addresses.outputs,),
                name="EngineCoreOutput",
                daemon=True,
            )
            self.input_thread.start()
            self.output_thread.start()
            ready.wait()

    # ------------------------------------------------------------------ handshake

    @contextlib.contextmanager
    def _perform_handshake(
        self,
        address: str,
        identity: bytes,
        local_client: bool,
        parallel_config: ParallelConfig,
    ) -> Iterator[EngineZmqAddresses]:
        """Say HELLO before the body and READY after it, or FAILED with what the body raised."""
        with _handshake_socket(address, identity) as socket:
            where = {"local": local_client, "headless": not local_client}
            addresses = self.startup_handshake(
                socket, local_client, not local_client, parallel_config
            )
            try:
                yield addresses
            except Exception as error:
                _log_failed_start(error)
                socket.send(msgspec.msgpack.encode(describe_startup_error(error) | where))
                raise
            socket.send(msgspec.msgpack.encode({"status": "READY", **where}))

    @staticmethod
    def startup_handshake(
        handshake_socket: zmq.Socket[Any],
        local_client: bool,
        headless: bool,
        parallel_config: ParallelConfig | None = None,
    ) -> EngineZmqAddresses:
        """Say HELLO; returns the addresses of the answer and sets its values in
        `parallel_config`. RuntimeError if there is no answer."""
        hello = {"status": "HELLO", "local": local_client, "headless": headless}
        handshake_socket.send(msgspec.msgpack.encode(hello))
        if not handshake_socket.poll(HANDSHAKE_TIMEOUT_S * 1000):
            raise RuntimeError(f"The front end has not answered in {HANDSHAKE_TIMEOUT_S} s.")
        answer = msgspec.msgpack.decode(handshake_socket.recv(), type=EngineHandshakeMetadata)
        if parallel_config is not None:
            for name, value in answer.parallel_config.items():
                setattr(parallel_config, name, value)
        return answer.addresses

    def _ready_response(self) -> EngineCoreReadyResponse:
        config = self.vllm_config
        cache = config.cache_config
        assert config.model_config.max_model_len is not None and cache.block_size is not None
        try:
            vllm_version = version("vllmx")
        except PackageNotFoundError:  # run from a folder of sources
            vllm_version = ""
        return EngineCoreReadyResponse(
            max_model_len=config.model_config.max_model_len,
            num_gpu_blocks=cache.num_gpu_blocks or 0,
            block_size=cache.block_size,
            dp_stats_address=None,
            dtype=config.model_config.dtype,
            vllm_version=vllm_version,
            world_size=config.parallel_config.world_size,
            data_parallel_size=config.parallel_config.data_parallel_size,
            kv_cache_size_tokens=cache.kv_cache_size_tokens,
            kv_cache_max_concurrency=cache.kv_cache_max_concurrency,
        )

    # ------------------------------------------------------------------ input thread

    def process_input_sockets(
        self, input_addresses: list[str], identity: bytes, ready_event: threading.Event
    ) -> None:
        """Read the front ends' messages into the input queue; life of the input thread."""
        ready = msgspec.msgpack.encode(self._ready_response())
        poller = zmq.Poller()
        with contextlib.ExitStack() as stack:
            for address in input_addresses:
                socket = make_zmq_socket(
                    self._input_ctx, address, zmq.DEALER, identity=identity, linger=0
                )
                stack.enter_context(socket)
                socket.send(ready)  # also tells the front end's router who is here
                poller.register(socket, zmq.POLLIN)
            ready_event.set()
            try:
                self._read_messages(poller)
            except zmq.ContextTerminated:
                return
            except Exception as error:
                logger.exception("The engine core cannot read its messages.")
                failure = f"A message could not be read: {type(error).__name__}: {error}"
                self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, failure))

    def _read_messages(self, poller: zmq.Poller) -> None:
        add_request_decoder = MsgpackDecoder(EngineCoreRequest, allow_pickle=self._allow_pickle)
        generic_decoder = MsgpackDecoder(allow_pickle=self._allow_pickle)
        while True:
            for socket, _ in poller.poll():
                kind, *buffers = socket.recv_multipart(copy=False)
                request_type = EngineCoreRequestType(bytes(kind.buffer))
                if request_type != EngineCoreRequestType.ADD:
                    self.input_queue.put((request_type, generic_decoder.decode(buffers)))
                    continue
                try:
                    prepared, _ = self.preprocess_add_request(add_request_decoder.decode(buffers))
                except Exception:
                    # Whatever is wrong with it, it fails alone.
                    request_id, client_index = _sender(generic_decoder.decode(buffers))
                    logger.exception("Request %s was refused", request_id)
                    self._send_finished([(request_id, client_index)], FinishReason.ERROR)
                else:
                    self.input_queue.put((request_type, prepared))

    # ------------------------------------------------------------------ output thread

    def _queue_outputs(self, client_index: int, outputs: EngineCoreOutputs) -> None:
        self.output_queue.put((client_index, outputs))

    def process_output_sockets(self, output_paths: list[str]) -> None:
        """Write the output queue to the front ends; life of the output thread.

        Its last message is a list of frames, for all of them.
        """
        encoder = MsgpackEncoder(allow_pickle=self._allow_pickle)
        ctx: zmq.Context[Any] = zmq.Context()
        with ctx, contextlib.ExitStack() as stack:
            sockets = [make_zmq_socket(ctx, p, zmq.PUSH, linger=LINGER_MS) for p in output_paths]
            for socket in sockets:
                stack.enter_context(socket)
            while not isinstance(item := self.output_queue.get(), list):
                client_index, outputs = item
                outputs.engine_index = self.engine_index
                try:
                    buffers = _encode(encoder, outputs)
                except Exception as error:
                    logger.exception("The engine core cannot send its outputs.")
                    failure = f"An output could not be sent: {type(error).__name__}: {error}"
                    self.input_queue.put((EngineCoreRequestType.EXECUTOR_FAILED, failure))
                    continue
                # zmq copies small buffers and keeps large ones alive until they are sent.
                sockets[client_index].send_multipart(buffers, copy=False)
            for socket in sockets:
                socket.send_multipart(item)

    def _send_engine_dead(self, error: BaseException | None) -> None:
        """Send what is still queued and then that this was all, with the reason."""
        reason = "" if error is None else f"{type(error).__name__}: {error}"
        self.output_queue.put([self.ENGINE_CORE_DEAD, reason.encode()])
        self.output_thread.join(LINGER_MS / 1000 + 1)
        if self.output_thread.is_alive():
            logger.error("The engine core could not send its last outputs.")

    def shutdown(self) -> None:
        """Close the sockets and stop the workers."""
        if self.output_thread.is_alive():
            self._send_engine_dead(None)
        self._input_ctx.term()
        super().shutdown()

    # ------------------------------------------------------------------ process

    @staticmethod
    def run_engine_core(
        payload: bytes,
        local_client: bool,
        handshake_address: str,
        log_level: int = logging.WARNING,
        engine_index: int = 0,
    ) -> None:
        """Life of an engine's process. `payload`: the pickled (config, executor class, log_stats).

        The parent decides when it ends: SIGINT, which a terminal sends to both, is ignored.
        SIGTERM lets the requests in flight finish, a second one ends them.
        """
        parent_watch = _ParentWatch(handshake_address)
        engine_core: EngineCoreProc | None = None

        def handle_sigterm(signum: int, frame: FrameType | None) -> None:
            parent_watch.patience = PARENT_CHECK_S
            if engine_core is None:
                raise SystemExit(128 + signum)
            engine_core.request_shutdown(math.inf if engine_core.is_running() else 0.0)

        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, handle_sigterm)
        logging.basicConfig(level=log_level, format=LOG_FORMAT)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
            engine_core = _start(payload, local_client, handshake_address, engine_index)
            engine_core.run_busy_loop()
            engine_core.refuse_messages()
            engine_core._send_engine_dead(None)
        except Exception as error:
            if engine_core is not None:
                logger.exception("The engine core failed.")
                engine_core._send_engine_dead(error)
            raise SystemExit(1) from None
        finally:
            if engine_core is not None:
                engine_core.shutdown()
            parent_watch.check()


@contextlib.contextmanager
def _handshake_socket(address: str, identity: bytes) -> Iterator[zmq.Socket[Any]]:
    """A socket to a front end; leaving waits a while for what has still to be sent."""
    with zmq.Context() as ctx:
        socket = make_zmq_socket(ctx, address, zmq.DEALER, identity=identity, linger=LINGER_MS)
        with socket:
            yield socket


def _sender(fields: list[Any]) -> tuple[str, int]:
    """Request id and client index of an EngineCoreRequest's fields; defaults may be left out."""
    index = EngineCoreRequest.__struct_fields__.index("client_index")
    return fields[0], fields[index] if index < len(fields) else 0


def _encode(encoder: MsgpackEncoder, outputs: EngineCoreOutputs) -> Any:
    """The buffers of `outputs`; a result that has no form becomes the failure of its call."""
    try:
        return encoder.encode(outputs)
    except Exception as error:
        answer = outputs.utility_output
        if answer is None:
            raise
        failure = f"Its result cannot be sent: {error}"
        return encoder.encode(
            EngineCoreOutputs(utility_output=UtilityOutput(answer.call_id, failure))
        )


def _start(
    payload: bytes, local_client: bool, handshake_address: str, engine_index: int
) -> EngineCoreProc:
    """The engine core of `payload`; what fails its start is told to the front end as well."""
    try:
        vllm_config, executor_class, log_stats = pickle.loads(payload)
    except Exception as error:
        _tell_failure(handshake_address, engine_index, error)
        raise
    return EngineCoreProc(
        vllm_config,
        local_client,
        handshake_address,
        executor_class,
        log_stats,
        engine_index=engine_index,
    )


def _log_failed_start(error: Exception) -> None:
    """Before the front end is told: it may end this process then."""
    if not isinstance(error, UserError):  # that one is shown by the front end
        logger.exception("The engine core failed to start.")


def _tell_failure(handshake_address: str, engine_index: int, error: Exception) -> None:
    _log_failed_start(error)
    with _handshake_socket(handshake_address, engine_index.to_bytes(2, "little")) as socket:
        socket.send(msgspec.msgpack.encode(describe_startup_error(error)))


class _ParentWatch:
    """Ends this process at once, with the folder of its sockets, when the parent is gone.

    The parent's end of a pipe closes with it, unless a process that it forked holds a copy; so the
    id of the parent is looked at as well. patience: seconds that `check` gives a parent that may
    be ending too.
    """

    patience = 0.0

    def __init__(self, handshake_address: str) -> None:
        self._parent = parent_process()
        self._parent_pid = os.getppid()
        socket = urllib.parse.urlsplit(handshake_address)
        self._folder = Path(socket.path).parent if socket.scheme == "ipc" else None
        if self._parent is not None:
            threading.Thread(target=self._watch, name="EngineCoreParentWatch", daemon=True).start()

    def _watch(self) -> None:
        while not self._is_gone(PARENT_CHECK_S):
            pass
        self._leave()

    def _is_gone(self, seconds: float) -> bool:
        assert self._parent is not None
        gone = bool(connection.wait([self._parent.sentinel], seconds))
        return gone or os.getppid() != self._parent_pid

    def _leave(self) -> NoReturn:
        if self._folder is not None:
            remove_ipc_folder(self._folder)
        os._exit(1)

    def check(self) -> None:
        """Same at the end of a process that was told to end as its parent was."""
        if self._parent is not None and self._is_gone(self.patience):
            self._leave()
