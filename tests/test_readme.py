# SPDX-License-Identifier: Apache-2.0
"""README.md tells the truth: its commands run, its Python runs, its links lead somewhere."""

import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)( \w+)?\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
# What makes the very environment that the tests run in.
SET_UP = {
    "pip install nox && nox -s demo",
    "nox -s tests",
    "pip install -e .",
}
pytestmark = pytest.mark.slow


def lines(kind: str) -> list[str]:
    """The commands of the bash blocks marked with `kind`."""
    return [
        line
        for language, mark, text in BLOCKS
        if language == "bash" and mark.strip() == kind
        for line in text.splitlines()
    ]


def run(command: str, **kwargs: object) -> subprocess.CompletedProcess:
    """Run a command of the README with the `vllmx` of this environment."""
    command = re.sub(r"\bvllmx\b(?= [a-z])", f"{shlex.quote(sys.executable)} -m vllmx", command)
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=280, **kwargs
    )


@pytest.mark.parametrize("command", [line for line in lines("") if line not in SET_UP])
def test_command_runs(command: str) -> None:
    result = run(command)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()
    if "capital of France" in command:
        assert result.stdout.startswith(" Paris.")


def test_set_up_commands_name_sessions_that_ci_runs() -> None:
    """Compared as text: they make environments, so .ci/run executes the sessions themselves."""
    assert set(lines("")) >= SET_UP
    noxfile = (ROOT / "noxfile.py").read_text()
    ci = (ROOT / ".ci" / "run").read_text()
    for session in ("demo", "tests"):
        assert f"def {session}(session: nox.Session)" in noxfile
        assert f"--session {session}" in ci


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The server of the README on a free port; yields that port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    (command,) = lines("server")
    argv = [sys.executable, "-m", *shlex.split(command.replace("8000", port))]
    process = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not _healthy(port):
        assert process.poll() is None and time.monotonic() < deadline, "the server does not start"
        time.sleep(0.2)
    yield port
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def _healthy(port: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False


@pytest.mark.parametrize("command", lines("client"))
def test_client_command_runs(server: str, command: str) -> None:
    command = command.replace("8000", server)
    if command.startswith("curl"):  # not on every machine
        url = command.split()[-1]
        assert b"smollm2-135m" in urllib.request.urlopen(url, timeout=30).read()
        return
    result = run(command)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()


def test_python_runs() -> None:
    (code,) = [text for language, _, text in BLOCKS if language == "python"]
    result = subprocess.run(
        [sys.executable, "-c", code], cwd="/", capture_output=True, text=True, timeout=280
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "The capital of France is  Paris." in result.stdout


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text(encoding="utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert [link for link in local if not (ROOT / link).exists()] == []
