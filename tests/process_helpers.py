# SPDX-License-Identifier: Apache-2.0
"""Engine cores in processes: workers that a child can import, clients, and what is left of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from engine_helpers import make_config

from vllmx.config import VllmConfig
from vllmx.core.output import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput
from vllmx.engine.core_client import EngineCoreClient
from vllmx.engine.executor import UniProcExecutor
from vllmx.exceptions import CheckpointError
from vllmx.worker.null_runner import NullWorker

DEADLINE = 60.0
"""Seconds after which a test counts as hung."""


class OddError(CheckpointError):
    """A user error that the parent does not know."""


class BrokenWorker(NullWorker):
    """Its checkpoint cannot be read."""

    def load_model(self) -> None:
        """Fail as a loader does."""
        raise OddError("weights.gguf is truncated: get it again.")


class BuggyWorker(NullWorker):
    """Fails to load in a way that is nobody's mistake."""

    def load_model(self) -> None:
        """Fail."""
        raise KeyError("unforeseen")


class SlowToLoadWorker(NullWorker):
    """Takes a minute to load."""

    def load_model(self) -> None:
        """Wait."""
        time.sleep(60)


class LogprobsWorker(NullWorker):
    """Adds 200 log-probabilities to each token, an array that is sent beside its message."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        sample = self.sample_tokens

        def sample_tokens(grammar_output: Any) -> ModelRunnerOutput:
            output = sample(grammar_output)
            assert isinstance(output, ModelRunnerOutput)
            rows = len(output.req_ids)
            ids = np.arange(rows * 200, dtype=np.int32).reshape(rows, 200)
            ranks = np.ones(rows, dtype=np.int32)
            output.logprobs = LogprobsLists(ids, -ids.astype(np.float32), ranks)
            return output

        self.sample_tokens = sample_tokens  # type: ignore[method-assign]

    def report(self, what: str, extra: int = 0) -> Any:
        """For collective_rpc: something that can be sent, cannot be sent, or fails."""
        if what == "fails":
            raise ValueError("no report today")
        return os.getpid() + extra if what == "pid" else threading_lock()


class FailsWhileWaitingWorker(NullWorker):
    """The second step is launched well and fails when its result is waited for."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config, delay=0.1)
        sample = self.sample_tokens
        self.sample_tokens = lambda grammar: _LateFailure(  # type: ignore[method-assign]
            sample(grammar), self.model_runner.num_steps
        )


class _LateFailure(AsyncModelRunnerOutput):
    def __init__(self, output: Any, step: int) -> None:
        self.output, self.step = output, step

    def get_output(self) -> ModelRunnerOutput:
        if self.step == 2:
            raise RuntimeError("the device is lost")
        return self.output


def threading_lock() -> Any:
    """Something that no format has a form for."""
    import threading

    return threading.Lock()


def process_config(worker: Any = None, **settings: Any) -> VllmConfig:
    """A config whose worker a child process can import; `delay` and `fail_at_step` are the null
    worker's."""
    options = {k: settings.pop(k) for k in ("delay", "fail_at_step") if k in settings}
    config = make_config(**{"num_blocks": 200, "max_model_len": 128, **settings})
    config.parallel_config.worker_cls = worker or partial(NullWorker, check=True, **options)
    return config


def make_mp_client(asyncio_mode: bool, worker: Any = None, **settings: Any) -> Any:
    """A client of an engine core in a process."""
    config = process_config(worker, **settings)
    return EngineCoreClient.make_client(True, asyncio_mode, config, UniProcExecutor, True)


def process_of(client: Any) -> Any:
    """The engine's process."""
    return client.resources.engine_manager.processes[0]


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Run `main` under a deadline, so that a hang is a failure."""
    return asyncio.run(asyncio.wait_for(main, DEADLINE))


async def collect(client: Any, finished: set[str]) -> tuple[dict[str, list[int]], dict[str, Any]]:
    """Read outputs until the requests named in `finished` have ended: tokens, reasons."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, Any] = {}
    while not finished <= set(reasons):
        outputs = await asyncio.wait_for(client.get_output_async(), DEADLINE)
        for output in outputs.outputs:
            assert output.request_id not in reasons, "output after the last one"
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finished:
                reasons[output.request_id] = output.finish_reason
    return tokens, reasons


def is_running(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Poll `condition` until it holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true in time"
        time.sleep(0.02)
