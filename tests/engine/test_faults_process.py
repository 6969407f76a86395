# SPDX-License-Identifier: Apache-2.0
"""The engine's process fails, is killed, or loses its parent: nobody waits in vain, nothing is
left behind."""

import asyncio
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from engine_helpers import make_engine_request
from process_helpers import (
    BrokenWorker,
    BuggyWorker,
    FailsWhileWaitingWorker,
    SlowToLoadWorker,
    collect,
    is_running,
    make_mp_client,
    process_config,
    process_of,
    run,
    wait_until,
)

from vllmx.engine import FinishReason
from vllmx.engine import utils as engine_utils
from vllmx.engine.core_client import EngineCoreClient
from vllmx.engine.executor import UniProcExecutor
from vllmx.exceptions import CheckpointError, EngineDeadError, UserError
from vllmx.worker.null_runner import NullWorker

pytestmark = pytest.mark.timeout(120)
TESTS = Path(__file__).parents[1]


async def everybody_waits(client):
    """Errors of all who wait for a dying engine: for outputs, for answers, and who comes later."""

    async def read():
        while True:
            await client.get_output_async()

    async def call():
        while True:
            await client.is_scheduler_paused_async()
            await asyncio.sleep(0.001)

    errors = await asyncio.gather(read(), read(), call(), call(), return_exceptions=True)
    for late in (
        client.add_request_async(make_engine_request("late")),
        client.get_output_async(),
        client.reset_prefix_cache_async(),
    ):
        with pytest.raises(EngineDeadError) as caught:
            await late
        errors.append(caught.value)
    await client.abort_requests_async(["late"])  # nobody to tell, nothing to raise
    assert len({id(error) for error in errors}) == len(errors)
    return errors


# ---------------------------------------------------------------- in the middle of a step


@pytest.mark.parametrize(
    ("worker", "async_scheduling", "cause"),
    [
        (partial(NullWorker, fail_at_step=2, delay=0.1), False, "scripted failure of step 2"),
        (FailsWhileWaitingWorker, True, "the device is lost"),
    ],
)
def test_failed_step_reaches_everybody_with_its_cause(worker, async_scheduling, cause, capfd):
    client = make_mp_client(True, worker, async_scheduling=async_scheduling)
    process = process_of(client)

    async def main():
        await client.add_request_async(make_engine_request("a", max_tokens=50))
        return await everybody_waits(client)

    for error in run(main()):
        assert isinstance(error, EngineDeadError)
        assert str(error) == f"The engine core is dead: RuntimeError: {cause}"
    process.join(10)
    assert process.exitcode == 1
    assert not client.is_alive and cause in str(client.dead_error)
    client.shutdown()
    assert capfd.readouterr().err.count("Traceback") == 1  # the engine's own


def test_failed_step_reaches_a_blocked_thread():
    client = make_mp_client(False, partial(NullWorker, fail_at_step=2, delay=0.1))
    client.add_request(make_engine_request("a"))
    client.get_output()
    for call in (client.get_output, client.get_output, client.is_scheduler_paused):
        with pytest.raises(EngineDeadError, match="scripted failure"):
            call()
    with pytest.raises(EngineDeadError):
        client.add_request(make_engine_request("b"))
    client.abort_requests(["a"])
    client.shutdown()


# ---------------------------------------------------------------- killed


def test_killed_engine_reaches_everybody_at_once():
    client = make_mp_client(True, delay=0.02)
    folder = client.resources.folder

    async def main():
        for i in range(8):
            await client.add_request_async(make_engine_request(f"r{i}", max_tokens=100))
        await client.get_output_async()
        waiting = asyncio.create_task(everybody_waits(client))
        await asyncio.sleep(0.05)
        os.kill(process_of(client).pid, signal.SIGKILL)
        killed = time.monotonic()
        errors = await waiting
        assert time.monotonic() - killed < 3
        return errors

    for error in run(main()):
        assert str(error) == "The engine core is dead: its process was killed by SIGKILL"
    client.shutdown()
    assert not folder.exists()


def test_killed_engine_ends_a_blocked_call():
    client = make_mp_client(False, delay=30.0)
    client.add_request(make_engine_request("a"))
    threading.Timer(0.2, os.kill, (process_of(client).pid, signal.SIGKILL)).start()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        while True:  # once the step has begun, its end is waited for
            client.is_scheduler_paused()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        client.get_output()
    client.shutdown()


def test_engine_that_does_not_end_in_time_is_killed(monkeypatch):
    monkeypatch.setattr("vllmx.engine.mp_client.SHUTDOWN_GRACE_S", 0.3)
    client = make_mp_client(True, delay=60.0)
    pid = process_of(client).pid

    async def main():
        await client.add_request_async(make_engine_request("a"))
        await asyncio.sleep(0.3)
        await client.shutdown_async()
        with pytest.raises(EngineDeadError):
            await client.get_output_async()

    run(main())
    assert not is_running(pid)


def test_sigterm_lets_requests_finish_a_second_one_ends_them_and_sigint_is_ignored():
    client = make_mp_client(True, delay=0.02)
    process = process_of(client)

    async def main():
        await client.add_request_async(make_engine_request("short", max_tokens=20))
        await client.add_request_async(make_engine_request("long", max_tokens=119))
        await client.get_output_async()
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        _, reasons = await collect(client, {"short"})
        assert reasons["short"] == FinishReason.LENGTH
        os.kill(process.pid, signal.SIGTERM)
        _, reasons = await collect(client, {"long"})
        assert reasons["long"] == FinishReason.ABORT

    run(main())
    process.join(10)
    assert process.exitcode == 0
    assert str(client.dead_error) == "The engine core has been shut down."


# ---------------------------------------------------------------- start


def started_processes(monkeypatch):
    """The processes that clients start from now on."""
    processes = []
    start = engine_utils.CoreEngineProcManager.__init__

    def remember(self, *args, **kwargs):
        start(self, *args, **kwargs)
        processes.extend(self.processes)

    monkeypatch.setattr(engine_utils.CoreEngineProcManager, "__init__", remember)
    return processes


@pytest.mark.parametrize(
    ("worker", "settings", "error", "message"),
    [
        (None, {"num_blocks": 5, "max_model_len": 999}, UserError, "999"),
        ("process_helpers.Nobody", {}, UserError, "parallel.worker_cls"),
        (BrokenWorker, {}, CheckpointError, "weights.gguf is truncated: get it again."),
        (
            BuggyWorker,
            {},
            RuntimeError,
            "Engine core initialization failed.*KeyError: 'unforeseen'",
        ),
    ],
)
def test_failed_start_is_raised_where_the_client_is_made(
    worker, settings, error, message, monkeypatch, capfd
):
    processes = started_processes(monkeypatch)
    threads = set(threading.enumerate())
    with pytest.raises(error, match=message) as caught:
        make_mp_client(True, worker, **settings)
    assert type(caught.value) is error
    assert not is_running(processes[0].pid)
    assert not {t for t in set(threading.enumerate()) - threads if t.is_alive()}
    traceback = "Traceback" in capfd.readouterr().err
    assert traceback == (worker is BuggyWorker)  # a user's mistake has none


def test_engine_killed_while_it_loads_is_a_failed_start(monkeypatch):
    processes = started_processes(monkeypatch)

    def kill():
        wait_until(lambda: bool(processes))
        os.kill(processes[0].pid, signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(RuntimeError, match=r"Engine core initialization failed.*-9"):
        make_mp_client(True, SlowToLoadWorker)


def test_error_in_what_goes_on_meanwhile_ends_the_engine(monkeypatch):
    processes = started_processes(monkeypatch)

    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        EngineCoreClient.make_async_mp_client(
            process_config(SlowToLoadWorker), UniProcExecutor, True, while_starting=fail
        )
    assert not is_running(processes[0].pid)


def test_config_that_cannot_be_sent_is_refused_before_anything_starts(monkeypatch):
    processes = started_processes(monkeypatch)
    with pytest.raises(UserError, match=r"at the top level of a module.*enable_multiprocessing"):
        make_mp_client(True, lambda config: NullWorker(config))
    assert not processes


def test_daemonic_parent_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(UserError, match=r"daemonic.*enable_multiprocessing=false"):
        make_mp_client(True)


def test_folder_too_deep_for_sockets_is_refused(monkeypatch, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(UserError, match="set TMPDIR to a shorter one"):
        make_mp_client(True)
    assert not list(deep.iterdir())


# ---------------------------------------------------------------- parents


SCRIPT = f"""
import os, sys, time
sys.path.insert(0, {str(TESTS)!r})
from engine_helpers import make_engine_request
from process_helpers import make_mp_client, process_of, SlowToLoadWorker
from vllmx.engine.core_client import EngineCoreClient
from vllmx.engine.executor import UniProcExecutor

def start():
    client = make_mp_client(False, delay=0.05)
    client.add_request(make_engine_request("a", max_tokens=100))
    client.get_output()
    print(process_of(client).pid, client.resources.folder, flush=True)
    return client
"""


def parent(code, tmp_path, **kwargs):
    """A process that runs SCRIPT and `code`, as a file so that a child imports it."""
    script = tmp_path / "main.py"
    script.write_text(SCRIPT + code)
    command = [sys.executable, str(script)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=TESTS.parent,
        **kwargs,
    )


def test_engine_does_not_outlive_a_killed_parent(tmp_path):
    code = "if __name__ == '__main__':\n    client = start()\n    time.sleep(60)\n"
    process = parent(code, tmp_path)
    pid, folder = process.stdout.readline().split()
    assert is_running(int(pid)) and Path(folder).exists()
    process.kill()
    killed = time.monotonic()
    wait_until(lambda: not is_running(int(pid)), 5)
    assert time.monotonic() - killed < 3
    assert not Path(folder).exists()
    process.communicate(timeout=10)


@pytest.mark.parametrize("loading", [False, True])
def test_sigterm_to_parent_and_engine_leaves_no_folder(loading, tmp_path):
    code = "    client = start()\n    client.abort_requests(['a'])\n    time.sleep(60)\n"
    if loading:
        code = "    make_mp_client(False, SlowToLoadWorker)\n"
    with tempfile.TemporaryDirectory(prefix="t-") as short:
        code = f"import tempfile\ntempfile.tempdir = {short!r}\nif __name__ == '__main__':\n" + code
        process = parent(code, tmp_path, start_new_session=True)
        wait_until(lambda: bool(list(Path(short).glob("*/handshake"))))
        if not loading:
            process.stdout.readline()
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(10) == -signal.SIGTERM
        wait_until(lambda: not os.listdir(short), 6)


def test_engine_ends_though_a_fork_of_the_parent_holds_its_pipe(tmp_path):
    code = "if __name__ == '__main__':\n    client = start()\n    os.fork() or time.sleep(8)\n"
    code += "    time.sleep(60)\n"
    process = parent(code, tmp_path, start_new_session=True)
    pid, _ = process.stdout.readline().split()
    process.kill()
    try:
        wait_until(lambda: not is_running(int(pid)), 6)
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_parent_that_just_ends_takes_the_engine_along(tmp_path):
    process = parent("if __name__ == '__main__':\n    client = start()\n", tmp_path)
    pid, folder = process.stdout.readline().split()
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (0, "")
    assert not is_running(int(pid)) and not Path(folder).exists()


def test_script_without_a_guard_says_what_to_do(tmp_path):
    process = parent("start()\n", tmp_path)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "put what it runs under `if __name__ == '__main__':`" in stderr
    assert "Engine core initialization failed" in stderr


def test_forgotten_client_takes_its_process_along():
    client = make_mp_client(True)
    pid = process_of(client).pid
    del client
    gc.collect()
    wait_until(lambda: not is_running(pid), 10)
