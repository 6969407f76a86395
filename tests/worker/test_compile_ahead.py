# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled side by side: nothing is launched, nothing is left changed.

Without a GPU Triton compiles nothing that it would launch, so its launch is played here; on a GPU
tests/gpu/test_memory.py looks at a whole start.
"""

import threading

import pytest
import torch

from vllmx.platform import has

pytestmark = pytest.mark.skipif(not has("triton"), reason="the package triton is not installed")


class Kernel:
    """What Triton's launch is played with: compiles in the pool, as triton.compile would."""

    def __init__(self) -> None:
        self.compiled: list[tuple[int, bool]] = []
        self.launches = 0
        self.error: Exception | None = None


class Compiled:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    @property
    def run(self):
        self.kernel.compiled.append((threading.get_ident(), True))
        return lambda: None


@pytest.fixture
def launch(monkeypatch):
    from triton.runtime import _async_compile
    from triton.runtime.jit import JITFunction

    def run(kernel, *args, grid, warmup, **options):
        kernel.launches += not warmup
        mode = _async_compile.active_mode.get()

        def compile_kernel():
            if kernel.error is not None:
                raise kernel.error
            return Compiled(kernel)

        key = (id(kernel), *map(str, args))
        finish = [lambda compiled: None] * (len(_submit_parameters(mode)) - 2)
        mode.submit(key, compile_kernel, *finish)

    monkeypatch.setattr(JITFunction, "run", run)
    return JITFunction


def _submit_parameters(mode):
    """Triton 3.7 has a parameter more."""
    import inspect

    return inspect.signature(mode.submit).parameters


def test_each_kind_of_launch_is_compiled_once_with_its_launcher_and_not_launched(launch) -> None:
    from vllmx.kernels.compile_ahead import compiling_ahead

    kernel, aligned = Kernel(), torch.zeros(64)
    original = launch.run
    with compiling_ahead(2):
        for _ in range(5):
            launch.run(kernel, aligned, 16, grid=(1,), warmup=False, BLOCK=8)
        launch.run(kernel, aligned[1:], 16, grid=(1,), warmup=False, BLOCK=8)
        launch.run(kernel, aligned, 17, grid=(1,), warmup=False, BLOCK=8)
        launch.run(kernel, aligned.half(), 16, grid=(1,), warmup=False, BLOCK=8)
    assert kernel.launches == 0
    assert len(kernel.compiled) == 4
    assert threading.get_ident() not in {thread for thread, _ in kernel.compiled}
    assert launch.run is original


def test_what_no_kernel_wrote_reads_as_zeros_meanwhile(launch) -> None:
    from vllmx.kernels.compile_ahead import compiling_ahead

    empty = torch.empty
    with compiling_ahead(1):
        made = torch.empty(1000, dtype=torch.int64), torch.empty_like(torch.ones(1000))
        assert not made[0].any() and not made[1].any()
        assert torch.empty(3, device="meta").shape == (3,)
    assert torch.empty is empty


def test_an_error_of_the_compiler_or_of_the_step_comes_out_and_leaves_torch_as_it_was(launch):
    from vllmx.kernels.compile_ahead import compiling_ahead

    original, empty, kernel = launch.run, torch.empty, Kernel()
    kernel.error = ValueError("no such instruction")
    with pytest.raises(ValueError, match="no such instruction"), compiling_ahead(1):
        launch.run(kernel, 1, grid=(1,), warmup=False)
    with pytest.raises(KeyError), compiling_ahead(1):
        raise KeyError("of the step")
    assert launch.run is original and torch.empty is empty


def test_another_thread_launches_meanwhile_as_ever(launch, monkeypatch) -> None:
    """An engine that serves, while one beside it starts."""
    from vllmx.kernels.compile_ahead import compiling_ahead

    launched, made = [], []
    monkeypatch.setattr(launch, "run", lambda kernel, *args, **options: launched.append(args))
    full = torch.full
    monkeypatch.setattr(torch, "empty", lambda *size: full(size, 7.0))

    def serve() -> None:
        launch.run(Kernel(), 1, grid=(1,), warmup=False)
        made.append(torch.empty(3))

    with compiling_ahead(1):
        other = threading.Thread(target=serve)
        other.start()
        other.join()
        assert torch.empty(3).tolist() == [0.0] * 3
    assert launched == [(1,)] and made[0].tolist() == [7.0] * 3


def test_two_starts_in_one_process_take_turns(launch) -> None:
    from vllmx.kernels.compile_ahead import compiling_ahead

    original, entered = launch.run, threading.Event()

    def start() -> None:
        with compiling_ahead(1):
            entered.set()

    with compiling_ahead(1):
        other = threading.Thread(target=start)
        other.start()
        assert not entered.wait(0.05)
    other.join()
    assert entered.is_set() and launch.run is original
