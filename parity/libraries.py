# SPDX-License-Identifier: Apache-2.0
"""Which libraries decide on a cell, and the versions that its evidence has to be of.

The versions are those of libraries.yaml, not those that happen to be installed where a ledger is
rendered: it is the same on any machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import yaml

from vllmx.exceptions import UserError

FILE = "libraries.yaml"
NAMES = ("torch", "numpy", "triton", "tokenizers", "jinja2", "xgrammar")
"""Libraries that the `run` of evidence has the versions of."""
BY_KIND = {
    "op": ("torch", "numpy"),
    "probe": ("torch",),
    "model": ("torch", "numpy"),
    "text": ("tokenizers", "jinja2"),
}
"""Kind of cell -> what decides on all of them; for tests it is what their files import."""
WITH_KERNELS = "triton"
"""Provider, and library, of kernels that are compiled when they are first called."""
IMPORT = re.compile(rf"^\s*(?:import|from)\s+({'|'.join(NAMES)})\b", re.MULTILINE)

Versions = Mapping[str, Mapping[str, str]]


def load(path: Path) -> Versions:
    """Device -> library -> version; none without a file. UserError where it says something else."""
    raw = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    for device, versions in raw.items():
        if unknown := set(versions) - set(NAMES):
            raise UserError(
                f"{path}: {device}: no library {', '.join(sorted(unknown))}; "
                f"evidence has the versions of {', '.join(NAMES)}."
            )
        if not all(isinstance(version, str) for version in versions.values()):
            raise UserError(f"{path}: {device}: write every version as text, in quotes.")
    return dict(raw)


def of_kind(kind: str, provider: str, device: str) -> tuple[str, ...]:
    """What decides on a cell of a golden."""
    names = BY_KIND.get(kind, ())
    kernels = provider == WITH_KERNELS or (kind == "model" and device == "cuda")
    return (*names, WITH_KERNELS) if names and kernels else names


def imported(files: Iterable[str], root: Path) -> tuple[str, ...]:
    """The libraries that files of ours import, in the order of NAMES."""
    found: set[str] = set()
    for name in files:
        path = root / name
        if path.suffix == ".py" and path.is_file():
            found |= set(IMPORT.findall(path.read_text(encoding="utf-8")))
    return tuple(name for name in NAMES if name in found)


def cause(wanted: Mapping[str, str], names: Iterable[str], run: Mapping[str, object]) -> str:
    """Which library a run had in another version than is wanted; empty if none. What a run does
    not tell, as older ones didn't, is not held against it."""
    for name in names:
        have, want = str(run.get(name, "")), wanted.get(name, "")
        if have and want and plain(have) != plain(want):
            return f"{name} was {have}, evidence is wanted of {want} (parity/{FILE})"
    return ""


def plain(version: str) -> str:
    """A version without the label of its build."""
    return version.partition("+")[0]
