# SPDX-License-Identifier: Apache-2.0
"""`run_server` in a process of its own: signals, exit codes, ports."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_helpers import is_running
from server.helpers import MODEL, events, post, wait_until

from vllmx.entrypoints.openai.launcher import create_server_socket, socket_url
from vllmx.exceptions import UserError

ROOT = Path(__file__).parents[2]
SCRIPT = """
import logging, sys
sys.path.insert(0, {tests!r})
from vllmx.config import RunConfig, finalize
from vllmx.entrypoints.openai.api_server import run_server

logging.basicConfig(level=logging.INFO)
run = RunConfig()
run.model.model, run.model.name = {model!r}, {name!r}
run.parallel.worker_cls = "server.workers.{worker}"
run.server.host, run.server.port = "127.0.0.1", 0
run.server.shutdown_timeout = {timeout}
print("starting", file=sys.stderr, flush=True)
sys.exit(run_server(finalize(run), run.server))
"""


class Child:
    """A serving process; `log` is what it wrote to stderr so far."""

    def __init__(self, model_folder: Path, worker: str, timeout: float) -> None:
        script = SCRIPT.format(
            tests=str(ROOT / "tests"),
            model=str(model_folder),
            name=MODEL,
            worker=worker,
            timeout=timeout,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        self.log = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log += line

    def wait_for(self, pattern: str, seconds: float = 60.0) -> re.Match[str]:
        """The first match of `pattern` in the log."""
        deadline = time.monotonic() + seconds
        while not (match := re.search(pattern, self.log)):
            assert time.monotonic() < deadline, self.log
            assert self.process.poll() is None, self.log
            time.sleep(0.02)
        return match

    def url(self) -> str:
        """Where it serves, once it does."""
        return self.wait_for(r"serving on (http://127\.0\.0\.1:\d+)")[1]

    def engine_pid(self) -> int:
        """Id of the engine's process, its only child but multiprocessing's tracker."""
        for pid in (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ):
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
        raise AssertionError("there is no engine process")

    def exit_code(self, seconds: float = 10.0) -> int:
        """Its exit code; it must end in `seconds`."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


@contextlib.contextmanager
def child(model_folder: Path, worker: str, timeout: float = 20.0) -> Iterator[Child]:
    """A serving process that is gone afterwards."""
    process = Child(model_folder, worker, timeout)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


class Stream:
    """A streamed request in a thread of its own."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.url, self.max_tokens = url, max_tokens
        self.lines: list[str] = []
        self.started = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        assert self.started.wait(20)

    def _run(self) -> None:
        body = {"prompt": "ab", "max_tokens": self.max_tokens, "stream": True}
        with (
            contextlib.suppress(httpx.HTTPError),
            httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=30) as response,
        ):
            for line in response.iter_lines():
                self.lines.append(line)
                self.started.set()

    def result(self) -> list[Any]:
        """All its events."""
        self.thread.join(20)
        text = "\n\n".join(line for line in self.lines if line)
        return events(httpx.Response(200, text=text))


def test_sigterm_lets_streams_finish_and_exits_0(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        url = server.url()
        streams = [Stream(url, 60) for _ in range(3)]
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            chunks = stream.result()
            assert sum(len(c["choices"][0]["text"]) for c in chunks) == 60
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        assert "Traceback" not in server.log


def test_sigterm_refuses_new_connections_while_it_drains(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        url = server.url()
        stream = Stream(url, 100)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0


def test_drain_ends_at_its_deadline_with_finish_reason_abort(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker", timeout=0.5) as server:
        stream = Stream(server.url(), 120)
        server.process.send_signal(signal.SIGTERM)
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "abort"
        assert server.exit_code(5) == 0


def test_second_sigterm_ends_at_once(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        Stream(server.url(), 120)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(5) == 143


def test_sigint_ends_at_once(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        stream = Stream(server.url(), 120)
        server.process.send_signal(signal.SIGINT)
        assert server.exit_code(5) == 130
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "abort"


def test_sigterm_when_idle_and_while_loading_exits_0(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        httpx.get(server.url() + "/health")
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(3) == 0
    with child(model_folder, "LoadingWorker") as server:
        server.wait_for("starting")
        time.sleep(1.5)
        server.process.send_signal(signal.SIGTERM)
        assert server.exit_code(3) == 0
        assert "Traceback" not in server.log


def test_dead_engine_ends_the_server_with_1(model_folder: Path) -> None:
    with child(model_folder, "FaultyWorker") as server:
        response = post(server.url(), "/v1/completions", {"prompt": "ab", "max_tokens": 20})
        assert response.status_code == 503
        assert server.exit_code(5) == 1
        assert "scripted failure of step 5" in server.log


def test_killed_engine_ends_streams_with_an_error_and_the_server_with_1(
    model_folder: Path,
) -> None:
    with child(model_folder, "SlowWorker") as server:
        streams = [Stream(server.url(), 120) for _ in range(3)]
        os.kill(server.engine_pid(), signal.SIGKILL)
        for stream in streams:
            error = stream.result()[-1]["error"]
            assert error["code"] == 503
            assert "its process was killed by SIGKILL" in error["message"]
        assert server.exit_code(5) == 1
        assert "Traceback" not in server.log


def test_engine_does_not_outlive_a_killed_server(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        Stream(server.url(), 120)
        engine = server.engine_pid()
        server.process.kill()
        wait_until(lambda: not is_running(engine))


def test_sigterm_to_the_engine_as_well_lets_streams_finish(model_folder: Path) -> None:
    with child(model_folder, "SlowWorker") as server:
        stream = Stream(server.url(), 60)
        engine = server.engine_pid()
        os.kill(engine, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        assert stream.result()[-1]["choices"][0]["finish_reason"] == "length"
        assert server.exit_code() == 0
        assert not is_running(engine)


def test_model_that_cannot_be_served_is_one_line_and_exit_2(model_folder: Path) -> None:
    command = [sys.executable, "-m", "vllmx", "serve", str(model_folder), "--port", "0"]
    command += ["parallel.worker_cls=vllmx.worker.null_runner.NullWorker"]
    command += ["cache.num_gpu_blocks_override=3", "--max-model-len", "128"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = (x for x in done.stderr.strip().splitlines() if not x.startswith("INFO vllmx."))
    assert "max_model_len" in line


def test_port_in_use_is_one_line_and_exit_2(model_folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "vllmx", "serve", str(model_folder)]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert f"port {port} is in use" in line


def test_sockets_say_where_they_are() -> None:
    with create_server_socket("127.0.0.1", 0) as sock:
        assert socket_url(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"
    with create_server_socket(None, 0) as sock:
        assert re.fullmatch(r"http://(127\.0\.0\.1|\[::1\]):\d+", socket_url(sock))
    with pytest.raises(UserError, match=r"server\.host=no\.such\.host\.invalid"):
        create_server_socket("no.such.host.invalid", 0)
