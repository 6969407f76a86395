# SPDX-License-Identifier: Apache-2.0
"""A start runs the largest step and compiles what it will launch.

What else runs on the GPU meanwhile changes what it has free, so these look at torch's own figures.
"""

import os
import subprocess
import sys

import pytest
from gpu_engine import answers, engine, prompts

from vllmx import SamplingParams
from vllmx.exceptions import UserError


def worker_of(llm):
    """The worker inside an engine of this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker


def test_what_was_foreseen_holds_when_the_largest_steps_come(folder) -> None:
    llm = engine(folder)
    worker = worker_of(llm)
    profile, memory = worker.memory_profile, worker.memory
    memory.reset_peak()
    start = memory.snapshot()
    hard = SamplingParams(
        temperature=1.0, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=20, max_tokens=8
    )
    answers(llm, prompts(40, longest=200), hard)
    end = memory.snapshot()
    assert end.torch_peak - start.allocated <= profile.activations


def test_a_cache_that_cannot_be_had_is_an_error_that_says_what_to_lower(folder) -> None:
    with pytest.raises(UserError, match="kv_cache_memory_bytes"):
        engine(folder, kv_cache_memory_bytes=1 << 42)


LISTENING = """
import sys
from checkpoints import save_tiny
from gpu_engine import engine
from triton import knobs
from vllmx.worker import gpu_worker

late, early = [], []
knobs.runtime.jit_post_compile_hook = lambda **told: early.append(told["repr"])
compile_kernels = gpu_worker.compile_kernels

def then_listen(*args):
    compile_kernels(*args)
    knobs.runtime.jit_post_compile_hook = lambda **told: late.append(told["repr"])

gpu_worker.compile_kernels = then_listen
save_tiny("qwen3", sys.argv[1])
engine(sys.argv[1])
print(len(early), late)
"""


def test_no_kernel_of_a_start_is_compiled_outside_of_the_pool(tmp_path) -> None:
    """Those of the largest step and of every graph are compiled side by side before it."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path / "kernels")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", LISTENING, str(tmp_path / "tiny")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    early, late = done.stdout.split(maxsplit=1)
    assert int(early) > 5
    assert late.strip() == "[]"
