# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/launcher.py @ v0.25.0
"""Runs the app under uvicorn: the socket, the signals, draining, the watch over the engine."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import errno
import logging
import math
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
from fastapi import FastAPI
from uvicorn.config import LOGGING_CONFIG

from vllmx.config import ServerConfig
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

WATCHDOG_INTERVAL_S = 1.0
"""Seconds between two looks at the engine."""
ABORT_GRACE_S = 2.0
"""Seconds that aborted requests get to send their last event."""


def create_server_socket(host: str | None, port: int) -> socket.socket:
    """A bound socket, not listening yet; port 0 takes a free one. Raises UserError."""
    where = f"{host or '*'}:{port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # With the protocol named, or asyncio leaves Nagle's algorithm on: 40 ms an answer.
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise UserError(f"server.host={host}: {exc.strerror or exc}.") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as exc:
        sock.close()
        if exc.errno == errno.EADDRINUSE:
            raise UserError(
                f"port {port} is in use ({where}): stop what listens there, or choose another "
                "with --port (0 takes a free one)."
            ) from None
        raise UserError(f"cannot listen on {where}: {exc.strerror}.") from None
    return sock


def socket_url(sock: socket.socket) -> str:
    """The URL under which a client on this machine reaches `sock`."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """uvicorn's server without its own signal handlers; calls `on_listening` when it is up."""

    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `serve_http`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen, then say so."""
        await super().startup(sockets)
        if self.started:
            self._on_listening()


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's settings; its log goes to stderr, the access log too."""
    log_config = copy.deepcopy(LOGGING_CONFIG)
    log_config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    return uvicorn.Config(
        app,
        log_config=log_config,
        log_level=config.uvicorn_log_level,
        access_log=not config.disable_access_log,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout + ABORT_GRACE_S),
    )


class Lifetime:
    """When and why the server ends: signals, the drain's deadline, the death of the engine.

    `exit_code` is 0 after a drain, 1 after the engine died, 128 plus the signal when it had to
    end at once.
    """

    def __init__(
        self, server: Server, engine: AsyncLLM, active_requests: set[str], drain_s: float
    ) -> None:
        self.server = server
        self.engine = engine
        self.active_requests = active_requests
        self.drain_s = drain_s
        self.exit_code = 0
        self._tasks: list[asyncio.Task[None]] = []

    def handle_signal(self, signum: int) -> None:
        """The first SIGTERM drains; SIGINT, and any second signal, ends at once."""
        if signum == signal.SIGTERM and not self.server.should_exit:
            num_running = len(self.active_requests)
            logger.info("SIGTERM: finishing %d running requests", num_running)
            self.server.should_exit = True
            self._tasks.append(asyncio.ensure_future(self._abort_after(self.drain_s)))
            return
        self.exit_code = 128 + signum
        self.server.should_exit = True
        self._tasks.append(asyncio.ensure_future(self._abort_after(0.0)))
        self._tasks.append(asyncio.ensure_future(self._force_exit()))

    async def _abort_after(self, seconds: float) -> None:
        """Let clients read why their request ends: the engine gives it finish_reason abort."""
        await asyncio.sleep(seconds)
        if self.active_requests:
            logger.warning("Aborting %d requests", len(self.active_requests))
            await self.engine.abort(list(self.active_requests))

    async def _force_exit(self) -> None:
        await asyncio.sleep(0.3)
        self.server.force_exit = True

    async def watch_engine(self) -> None:
        """End the server once the engine is dead; run as a task."""
        while not self.engine.errored:
            await asyncio.sleep(WATCHDOG_INTERVAL_S)
        if self.server.should_exit and self.engine.dead_error.__cause__ is None:
            return  # both were told to end
        logger.error("The engine died; the server ends.")
        self.exit_code = 1
        self.server.should_exit = True

    def close(self) -> None:
        """Drop the tasks that still wait."""
        for task in self._tasks:
            task.cancel()


async def serve_http(
    app: FastAPI,
    engine: AsyncLLM,
    config: ServerConfig,
    sock: socket.socket,
    active_requests: set[str],
) -> int:
    """Serve on `sock` until a signal or the engine's death; returns the exit code.

    SIGTERM stops new connections and gives running requests `config.shutdown_timeout` seconds.
    """

    def on_listening() -> None:
        print(f"vllmx: serving on {socket_url(sock)}", file=sys.stderr, flush=True)

    server = Server(uvicorn_config(app, config), on_listening)
    lifetime = Lifetime(server, engine, active_requests, config.shutdown_timeout)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, lifetime.handle_signal, signum)
    watchdog = asyncio.create_task(lifetime.watch_engine())
    try:
        await server.serve(sockets=[sock])
    finally:
        watchdog.cancel()
        lifetime.close()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(signum)
    return lifetime.exit_code
