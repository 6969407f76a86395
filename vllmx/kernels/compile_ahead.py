# SPDX-License-Identifier: Apache-2.0
"""Compiles Triton's kernels side by side, before the first of them is launched.

A step that meets a kernel for the first time compiles it, and the next one after that: half a
minute of a start with an empty cache, on one core. Here steps are gone through without launching
any of our kernels; each is handed to a pool of threads as it would have been launched, and all are
there at the end. What torch computes in between, it computes on zeros.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

ALIGNED = 16
"""What Triton compiles anew for: addresses that are multiples of this, or are not."""
ALLOCATING = ("empty", "empty_like")


_ONE_AT_A_TIME = threading.Lock()
"""What is replaced meanwhile is put back as it was found."""


class _Compilers(ThreadPoolExecutor):
    """Threads that compile a kernel and also what launches it, a C file for each signature."""

    def submit(self, compile_kernel: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compiled() -> Any:
            kernel = compile_kernel(*args, **kwargs)
            assert callable(kernel.run), "which is what makes the launcher"
            return kernel

        return super().submit(compiled)


@contextmanager
def compiling_ahead(threads: int) -> Iterator[None]:
    """Within it a launch of one of our kernels compiles it, in one of `threads`, and does nothing
    else; all are compiled when it ends. An error of the compiler comes out at the end."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    seen: set[Any] = set()
    mine = threading.get_ident()  # another engine of this process goes on serving

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if threading.get_ident() != mine:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        key = (kernel, tuple(map(_kind, args)), tuple(sorted(options.items())))
        if key not in seen:  # asking Triton whether it has it costs ten times as much
            seen.add(key)
            launch(kernel, *args, grid=grid, warmup=True, **options)
        return None

    with _ONE_AT_A_TIME, ExitStack() as stack:
        launch = JITFunction.run
        stack.enter_context(AsyncCompileMode(stack.enter_context(_Compilers(threads))))
        for name in ALLOCATING:
            allocate = getattr(torch, name)
            stack.callback(setattr, torch, name, allocate)
            setattr(torch, name, _zeroed(allocate, mine))
        stack.callback(setattr, JITFunction, "run", launch)
        JITFunction.run = compile_only
        yield


def _zeroed(allocate: Callable[..., Tensor], thread: int) -> Callable[..., Tensor]:
    """`allocate`, filled in `thread`: what no kernel wrote may be taken for an index."""

    def allocated(*args: Any, **kwargs: Any) -> Tensor:
        tensor = allocate(*args, **kwargs)
        return tensor.zero_() if threading.get_ident() == thread else tensor

    return allocated


def _kind(argument: Any) -> Any:
    """What tells apart the arguments that a kernel may have to be compiled anew for."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % ALIGNED
    return argument if isinstance(argument, int) else type(argument)
