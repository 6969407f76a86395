# SPDX-License-Identifier: Apache-2.0
"""native.c as a loaded library: compiled once per machine by its C compiler, as Triton does.

The compiler takes under a second; `start_build` lets that pass while torch is being imported. The
result lies in ~/.cache/vllmx/kernels under a name made of all that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("native.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
OPENMP = "-fopenmp"

P, N, F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES = {
    "native_rms_norm": [P, N, P, N, P, P, N, N, F],
    "native_silu_and_mul": [P, N, P, N, N],
    "native_gelu_tanh_and_mul": [P, N, P, N, N],
    "native_rotary": [P, P, P, N, P, N, N, N, N, ctypes.c_int],
    "native_reshape_and_cache": [P, N, P, N, P, N, P, N, P, N, N],
    "native_paged_decode": [P, N, P, N, P, N, P, N, P, N, N, N, N, N, N, N, F, F, P],
}


class BuildError(Exception):
    """Why there is no library, in words for `vllmx info`."""


@cache
def library() -> Any:
    """The loaded library, or a str that says why there is none. The first call may compile it."""
    import torch

    try:
        loaded = ctypes.CDLL(str(_built(OPENMP)))
        if not _shares_threads(loaded, torch.get_num_threads()):
            # A second OpenMP would keep threads of its own, which get in the way of torch's.
            loaded = ctypes.CDLL(str(_built()))
    except (BuildError, OSError) as error:
        return str(error)
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, None
    return loaded


def _shares_threads(loaded: ctypes.CDLL, threads: int) -> bool:
    """Whether the library's OpenMP is torch's: what is set in one is seen by the other."""
    import torch

    torch.set_num_threads(threads + 1)
    seen = loaded.native_max_threads()
    torch.set_num_threads(threads)
    return seen == threads + 1


_building = threading.Lock()


def start_build() -> None:
    """Begin to compile, if that is still to do, beside whatever the caller does next."""
    threading.Thread(target=_try_build, name="native-build", daemon=True).start()


def _try_build() -> None:
    try:
        _built(OPENMP)
    except (BuildError, OSError) as error:  # `library` meets it again and returns it
        logger.debug("native kernels: %s", error)


def _built(*extra: str) -> Path:
    """The compiled file; a second caller waits for the first."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"needs a C compiler, and there is no {' or '.join(COMPILERS)}")
    path = _path(compiler, extra)
    with _building:
        if not path.exists():
            _compile(compiler, extra, path)
    return path


def _path(compiler: str, extra: tuple[str, ...]) -> Path:
    """Where the library for this source, compiler, processor and these flags belongs."""
    parts = [SOURCE.read_text(encoding="utf-8"), os.path.realpath(compiler), *FLAGS, *extra]
    processor = Path("/proc/cpuinfo")
    if processor.exists():
        lines = processor.read_text(encoding="utf-8").splitlines()
        parts += sorted({line for line in lines if line.startswith(("model name", "flags"))})
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return Path.home() / ".cache" / "vllmx" / "kernels" / f"native-{name}.so"


def _compile(compiler: str, extra: tuple[str, ...], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        output = Path(folder) / path.name
        command = [compiler, *FLAGS, *extra, str(SOURCE), "-o", str(output), "-lm"]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0:
            first = (result.stderr.strip() or "no message").splitlines()[0]
            raise BuildError(f"{compiler} cannot compile {SOURCE.name}: {first}")
        output.replace(path)
