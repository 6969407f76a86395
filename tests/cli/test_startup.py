# SPDX-License-Identifier: Apache-2.0
"""What a process does before there is an engine: fast, without torch, and quiet at its end."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

VLLMX = [sys.executable, "-m", "vllmx"]
CLI = [sys.executable, "-X", "importtime", "-m", "vllmx"]
YARDSTICK = [sys.executable, "-c", "import hydra, omegaconf"]
YARDSTICK_SECONDS = 0.22
"""What the yardstick takes on the quiet development machine: others may be slower, or busy."""
ATTEMPTS = 8
"""The best counts: other processes share the machine."""
HEAVY = ("torch", "transformers", "gguf", "fastapi", "uvicorn", "openai", "triton")


def imported(stderr: str) -> set[str]:
    """Top-level packages in the output of -X importtime."""
    rows = [line.rsplit("|", 1)[-1].strip() for line in stderr.splitlines() if "|" in line]
    return {row.split(".")[0] for row in rows}


ANSWERS = pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["serve", "smollm2-135m", "--cfg", "job"], 0),
        (["generate", "scheduler.max_num_seq=1"], 2),
        (["generate", "scheduler.max_num_seqs=none"], 2),
        (["generate", "smollm2-135m", "--prompt", "x", "--temperature", "-1"], 2),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)


@ANSWERS
def test_answers_without_torch(argv: list[str], code: int) -> None:
    result = subprocess.run([*CLI, *argv], capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr[-500:]
    assert not imported(result.stderr) & set(HEAVY)
    assert "Traceback" not in result.stderr
    if "--help" in argv:
        assert "hydra" not in imported(result.stderr)


def processor_seconds(argv: list[str], code: int) -> float:
    """Seconds of a processor: a machine that does nothing else takes as long by the clock."""
    before = os.times()
    result = subprocess.run(argv, capture_output=True, timeout=60)
    after = os.times()
    assert result.returncode == code
    spent = after.children_user - before.children_user
    return spent + after.children_system - before.children_system


@ANSWERS
def test_answers_in_half_a_second(argv: list[str], code: int) -> None:
    """Half a second of the quiet development machine, by a yardstick measured beside it."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        slowness = max(1.0, processor_seconds(YARDSTICK, 0) / YARDSTICK_SECONDS)
        best = min(best, processor_seconds([*VLLMX, *argv], code) / slowness)
        if best < 0.5:
            return
    raise AssertionError(f"{best:.2f} s")


def test_core_and_front_end_import_without_torch() -> None:
    modules = ["config", "request", "sampling_params", "core.scheduler", "core.kv_cache_manager"]
    code = "import sys, " + ", ".join(f"vllmx.{name}" for name in modules)
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def generate(model: str, *interpreter: str) -> subprocess.CompletedProcess:
    """Answer a prompt with a real model in a new process, with threads as by default.

    The last line of stderr is the peak of its resident memory in KiB. A small process in between
    asks for it: a child of a large process counts that one's pages as its own.
    """
    ask = "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]);"
    ask += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr);"
    ask += "sys.exit(code)"
    argv = ["generate", model, "--prompt", "The capital of France is", "--max-tokens", "2"]
    command = [sys.executable, "-c", ask, sys.executable, *interpreter, "-m", "vllmx", *argv]
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "TRITON_INTERPRET")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, env=env)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip()
    return result


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", "gemma3-270m"])
def test_generate_imports_only_what_it_needs(model: str) -> None:
    packages = imported(generate(model, "-X", "importtime").stderr)
    assert {"vllmx", "torch", "tokenizers"} <= packages
    assert not packages & {"gguf", "transformers", "fastapi", "uvicorn", "openai", "pytest"}


def hold_up() -> float:
    """How much longer than on an idle machine things take here and now, from importing torch."""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, timeout=120)
    return max(1.0, (time.monotonic() - start) / 1.5)


@pytest.mark.slow
@pytest.mark.alone
def test_first_token_comes_within_6_s_in_less_than_1_3_gb() -> None:
    best = float("inf")
    for _ in range(ATTEMPTS):
        slower = hold_up()
        *_, summary, peak = generate("smollm2-135m").stderr.splitlines()
        assert int(peak) * 1024 < 1.3e9
        found = re.search(r"first token (\d+\.\d+) s after start", summary)
        assert found, summary
        best = min(best, float(found[1]) / slower)
        if best <= 6.0:
            return
    raise AssertionError(f"{best:.2f} s")


def test_closed_stdout_is_quiet() -> None:
    command = f"{sys.executable} -m vllmx serve --help | head -1"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert result.stderr == "" and result.stdout.startswith("usage:")


def test_interrupt_exits_130_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "vllmx", "generate", "smollm2-135m", "--prompt-file", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell started in the background has this signal ignored, and so its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while not _reads_stdin(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")


READ_CALLS = ("0", "63")
"""Numbers of read(2), of x86-64 and of 64-bit Arm."""


def _reads_stdin(pid: int) -> bool:
    """Whether the process has come to its first read of stdin.

    An import that takes its time is quiet, too, and may swallow the interrupt: where the kernel
    tells the call that a process waits in, it has to be a read of file 0.
    """
    with contextlib.suppress(OSError), open(f"/proc/{pid}/syscall") as syscall:
        told = syscall.read().split()
        if told:  # the number of the call and its arguments, or that it runs
            return told[0] in READ_CALLS and told[1:2] == ["0x0"]
    with open(f"/proc/{pid}/io") as io:
        before = io.read()
    time.sleep(0.3)
    with open(f"/proc/{pid}/io") as io:
        return before == io.read() and os.path.exists(f"/proc/{pid}")
