# SPDX-License-Identifier: Apache-2.0
"""What a process does before there is an engine: fast, without torch, and quiet at its end."""

import os
import signal
import subprocess
import sys
import time

import pytest

CLI = [sys.executable, "-X", "importtime", "-m", "vllmx"]
HEAVY = ("torch", "transformers", "gguf", "fastapi", "uvicorn", "openai", "triton")


def imported(stderr: str) -> set[str]:
    """Top-level packages in the output of -X importtime."""
    rows = [line.rsplit("|", 1)[-1].strip() for line in stderr.splitlines() if "|" in line]
    return {row.split(".")[0] for row in rows}


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["--help"], 0),
        (["generate", "--help"], 0),
        (["serve", "smollm2-135m", "--cfg", "job"], 0),
        (["generate", "scheduler.max_num_seq=1"], 2),
        (["generate", "smollm2-135m", "--prompt", "x", "--temperature", "-1"], 2),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_answers_without_torch(argv: list[str], code: int) -> None:
    result = subprocess.run([*CLI, *argv], capture_output=True, text=True, timeout=60)
    assert result.returncode == code, result.stderr[-500:]
    assert not imported(result.stderr) & set(HEAVY)
    assert "Traceback" not in result.stderr
    if "--help" in argv:
        assert "hydra" not in imported(result.stderr)


def test_core_and_front_end_import_without_torch() -> None:
    modules = ["config", "request", "sampling_params", "core.scheduler", "core.kv_cache_manager"]
    code = "import sys, " + ", ".join(f"vllmx.{name}" for name in modules)
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_generate_path_imports_neither_gguf_nor_transformers() -> None:
    modules = "vllmx.tasks.generate, vllmx.entrypoints.llm, vllmx.worker.gpu_worker, "
    modules += "vllmx.model_loader.weights, vllmx.models.llama"
    code = f"import sys, {modules}; print(sorted(m for m in sys.modules if '.' not in m))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    for name in ("gguf", "transformers", "fastapi", "openai"):
        assert f"'{name}'" not in result.stdout


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
    )
    deadline = time.monotonic() + 30
    while not _reads_stdin(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "")


def _reads_stdin(pid: int) -> bool:
    """Whether the process has come to its first read of stdin."""
    with open(f"/proc/{pid}/io") as io:
        before = io.read()
    time.sleep(0.3)
    with open(f"/proc/{pid}/io") as io:
        return before == io.read() and os.path.exists(f"/proc/{pid}")
