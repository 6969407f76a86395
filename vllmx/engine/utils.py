# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/utils.py @ v0.25.0
"""Processes of engine cores: how they are started, greeted, watched and ended.

The handshake, on a socket of its own: the engine says HELLO and gets EngineHandshakeMetadata; when
it has loaded the model it says READY, or FAILED with the error that the caller is to see.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import pickle
import shutil
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import resource_tracker, util
from multiprocessing.process import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import zmq

from vllmx import exceptions
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

    from vllmx.config import VllmConfig
    from vllmx.engine.executor import Executor

logger = logging.getLogger(__name__)

STARTUP_POLL_PERIOD_MS = 10_000
"""Milliseconds between two debug lines while an engine loads."""
ENGINE_READY_TIMEOUT_S = 600
"""Seconds from an engine's READY to its first message."""
SHUTDOWN_GRACE_S = 10.0
"""Seconds that an engine has to end a step, and itself, before it is killed."""
EXIT_GRACE_S = 2.0
"""The same where nobody waits for the engine any more."""
IPC_FOLDER_PREFIX = "vllmx-ipc-"
_LONGEST_IPC_PATH = 100  # of 107 bytes that Linux has room for
_STOPPED_WITHOUT_WORDS = 0.2


@dataclass
class EngineZmqAddresses:
    """Sockets of the front ends, one of each kind for each of them."""

    inputs: list[str]
    """Where requests come from."""
    outputs: list[str]
    """Where outputs go to."""
    coordinator_input: str | None = None
    """Where the coordinator of several engines sends to them; None for one engine."""
    coordinator_output: str | None = None
    """Where engines send to the coordinator."""
    frontend_stats_publish_address: str | None = None
    """Where the coordinator publishes the load of the engines."""


@dataclass
class EngineHandshakeMetadata:
    """Answer to an engine's HELLO."""

    addresses: EngineZmqAddresses
    """Where it finds the front ends."""
    parallel_config: dict[str, Any] = field(default_factory=dict)
    """Values of its ParallelConfig that the front end decides."""


def make_ipc_folder() -> Path:
    """A new folder for sockets that this user alone may enter; the caller removes it."""
    folder = tempfile.mkdtemp(prefix=IPC_FOLDER_PREFIX)
    if len(folder) > _LONGEST_IPC_PATH - len("/handshake"):
        Path(folder).rmdir()
        raise UserError(f"{folder} is too long a path for a socket: set TMPDIR to a shorter one.")
    return Path(folder)


def make_zmq_socket(
    ctx: zmq.Context[Any],
    path: str,
    socket_type: int,
    bind: bool | None = None,
    identity: bytes | None = None,
    linger: int = 0,
) -> zmq.Socket[Any]:
    """A socket that queues without limit: what is sent is neither lost nor waited for.

    bind: None binds all kinds but DEALER, PUSH and REQ. linger: milliseconds for what is still to
    be sent when it is closed.
    """
    socket = ctx.socket(socket_type)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, linger)
    if identity is not None:
        socket.setsockopt(zmq.IDENTITY, identity)
    if bind is None:
        bind = socket_type not in (zmq.DEALER, zmq.PUSH, zmq.REQ)
    (socket.bind if bind else socket.connect)(path)
    return socket


class CoreEngineProcManager:
    """The processes of the engine cores that belong to one front end."""

    def __init__(
        self,
        local_engine_count: int,
        start_index: int,
        vllm_config: VllmConfig,
        local_client: bool,
        handshake_address: str,
        executor_class: type[Executor],
        log_stats: bool,
    ) -> None:
        """Start `local_engine_count` engines with indices from `start_index` on.

        UserError where the config cannot be sent to them.
        """
        from vllmx.engine.core_proc import EngineCoreProc

        _check_may_have_children()
        payload = _pickled((vllm_config, executor_class, log_stats))
        # What an application sets up for its log does not come along by itself.
        log_level = logging.getLogger("vllmx").getEffectiveLevel()
        context = multiprocessing.get_context("spawn")
        self.processes: list[SpawnProcess] = [
            context.Process(
                target=EngineCoreProc.run_engine_core,
                name="EngineCore" if local_engine_count == 1 else f"EngineCore_DP{index}",
                args=(payload, local_client, handshake_address, log_level, index),
            )
            for index in range(start_index, start_index + local_engine_count)
        ]
        self.manager_stopped = threading.Event()
        self._finalizer = weakref.finalize(self, _end, self.processes, self.manager_stopped)
        run_before_children_are_joined(self._finalizer, priority=10)
        try:
            with signals_held_back():
                for process in self.processes:
                    process.start()
        except BaseException:
            self.shutdown(0.0)
            raise

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the processes to end by themselves, then kill them."""
        self.manager_stopped.set()
        if self._finalizer.detach() is not None:
            end_processes(self.processes, SHUTDOWN_GRACE_S if timeout is None else timeout)

    def sentinels(self) -> list[int]:
        """A file descriptor a process that can be read from once it has ended."""
        return [process.sentinel for process in self.processes]

    def finished_procs(self) -> dict[str, int]:
        """Exit codes by name of those that have ended."""
        codes = {process.name: process.exitcode for process in self.processes}
        return {name: code for name, code in codes.items() if code is not None}

    def describe_exit(self) -> str:
        """How the first process that ended did so, for an error's text."""
        for process in self.processes:
            process.join(EXIT_GRACE_S)
        code = next(iter(self.finished_procs().values()), None)
        if code is None:
            return "its process does not answer"
        if code >= 0:
            return f"its process ended with exit code {code}"
        with contextlib.suppress(ValueError):
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process was killed by signal {-code}"


def run_before_children_are_joined(function: Callable[[], Any], priority: int) -> None:
    """Call `function` at the interpreter's exit, those of higher `priority` first.

    multiprocessing waits then for its children, and these may wait for us.
    """
    util.Finalize(None, function, exitpriority=priority)


def _end(processes: list[SpawnProcess], stopped: threading.Event) -> None:
    stopped.set()
    end_processes(processes, 0.0)


def end_processes(processes: list[SpawnProcess], timeout: float) -> None:
    """Kill those that have not ended in `timeout` seconds."""
    for process in processes:
        if process.pid is None:
            continue
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()


@contextlib.contextmanager
def signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM wait. A child inherits that, so none hits it before it is ready."""
    # Started by the first child otherwise, it would let the signals through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _check_may_have_children() -> None:
    if current_process().daemon:
        raise UserError(
            "A daemonic process of multiprocessing may have no child for the engine: set "
            "parallel.enable_multiprocessing=false."
        )
    if getattr(current_process(), "_inheriting", False):
        raise UserError(
            "The engine's process imports the main script, and that starts an engine again: put "
            "what it runs under `if __name__ == '__main__':`, or set "
            "parallel.enable_multiprocessing=false."
        )


def _pickled(payload: Any) -> bytes:
    try:
        return pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"The config cannot be sent to the engine's process ({error}): classes and functions "
            "in it must be at the top level of a module; or set "
            "parallel.enable_multiprocessing=false."
        ) from error


@contextlib.contextmanager
def launch_core_engines(
    vllm_config: VllmConfig,
    executor_class: type[Executor],
    log_stats: bool,
    addresses: EngineZmqAddresses,
    handshake_address: str,
) -> Iterator[CoreEngineProcManager]:
    """Start an engine's process; on leaving, wait until it is ready.

    What the body does goes on while the engine loads. Raises what failed the engine's start. If
    anything is raised, no process is left.
    """
    ctx: zmq.Context[Any] = zmq.Context()
    with ctx, make_zmq_socket(ctx, handshake_address, zmq.ROUTER) as handshake_socket:
        manager = CoreEngineProcManager(
            local_engine_count=1,
            start_index=0,
            vllm_config=vllm_config,
            local_client=True,
            handshake_address=handshake_address,
            executor_class=executor_class,
            log_stats=log_stats,
        )
        try:
            yield manager
            wait_for_engine_startup(handshake_socket, addresses, manager)
        except BaseException:
            manager.shutdown(0.0)
            raise


def wait_for_engine_startup(
    handshake_socket: zmq.Socket[Any],
    addresses: EngineZmqAddresses,
    proc_manager: CoreEngineProcManager,
) -> None:
    """Greet every engine of `proc_manager` and wait for its READY, however long it loads.

    Raises the UserError that an engine reports, RuntimeError for any other end of it.
    """
    poller = zmq.Poller()
    for source in (handshake_socket, *proc_manager.sentinels()):
        poller.register(source, zmq.POLLIN)
    num_ready = 0
    while num_ready < len(proc_manager.processes):
        events = dict(poller.poll(STARTUP_POLL_PERIOD_MS))
        if not events:
            logger.debug("The engine core is still loading.")
            continue
        # Its last words may come after its end.
        if handshake_socket not in events and not handshake_socket.poll(
            math.ceil(_STOPPED_WITHOUT_WORDS * 1000)
        ):
            raise _ended_while_starting(proc_manager)
        identity, content = handshake_socket.recv_multipart()
        message = msgspec.msgpack.decode(content)
        if message["status"] == "HELLO":
            answer = msgspec.msgpack.encode(EngineHandshakeMetadata(addresses))
            handshake_socket.send_multipart((identity, answer))
        elif message["status"] == "READY":
            num_ready += 1
        else:
            raise startup_error(message)


def wait_for_first_message(
    input_socket: zmq.Socket[Any], proc_manager: CoreEngineProcManager
) -> None:
    """Wait until an engine that was READY has sent something; RuntimeError if it ends instead."""
    poller = zmq.Poller()
    for source in (input_socket, *proc_manager.sentinels()):
        poller.register(source, zmq.POLLIN)
    events = dict(poller.poll(ENGINE_READY_TIMEOUT_S * 1000))
    if not events:
        raise TimeoutError(
            f"The engine core is ready but has sent nothing in {ENGINE_READY_TIMEOUT_S} s."
        )
    if input_socket not in events:
        raise _ended_while_starting(proc_manager)


def _ended_while_starting(manager: CoreEngineProcManager) -> RuntimeError:
    for process in manager.processes:
        process.join(_STOPPED_WITHOUT_WORDS)
    return RuntimeError(
        "Engine core initialization failed. See root cause above. "
        f"Failed core proc(s): {manager.finished_procs()}"
    )


def describe_startup_error(error: Exception) -> dict[str, str]:
    """The message that tells a front end what failed the start of its engine."""
    if not isinstance(error, UserError):
        return {"status": "FAILED", "kind": "", "message": f"{type(error).__name__}: {error}"}
    # One of a kind that the front end may not know arrives as the nearest that it does.
    known = [kind for kind in type(error).__mro__ if vars(exceptions).get(kind.__name__) is kind]
    return {"status": "FAILED", "kind": known[0].__name__, "message": str(error)}


def startup_error(message: dict[str, str]) -> Exception:
    """The error in a message of `describe_startup_error`."""
    if message["kind"]:
        return getattr(exceptions, message["kind"])(message["message"])
    return RuntimeError(
        f"Engine core initialization failed. See root cause above. {message['message']}"
    )


def remove_ipc_folder(folder: Path) -> None:
    """Remove a folder of `make_ipc_folder`, and no other, with its sockets; it may be gone."""
    if folder.name.startswith(IPC_FOLDER_PREFIX):
        shutil.rmtree(folder, ignore_errors=True)
