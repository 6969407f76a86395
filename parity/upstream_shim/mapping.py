# SPDX-License-Identifier: Apache-2.0
"""Reads upstream_map.yaml: what stands for which part of upstream, and what nothing stands for."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

MAPPINGS = (
    *("archive", "settings", "patience"),
    *("modules", "symbols", "members", "tests", "deselect"),
)
SECTIONS = ("suites", "as_cuda", *MAPPINGS)
ABSENCES = ("later", "replaced", "absent")


class MapError(ValueError):
    """The map says something that it must not; the message names the entry."""


@dataclass(frozen=True)
class Entry:
    """What the map says of one module or symbol: exactly one of the fields is set."""

    targets: tuple[str, ...] = ()
    """Dotted names in vllmx, looked up in this order."""
    adapter: str | None = None
    """Name in adapters.py, where upstream's call has another shape."""
    constant: tuple[Any] | None = None
    """A value, e.g. of a setting that upstream reads from the environment."""
    absence: str | None = None
    """Why nothing stands for it."""


@dataclass(frozen=True)
class UpstreamMap:
    """upstream_map.yaml, checked."""

    archive: dict[str, str]
    suites: tuple[str, ...]
    as_cuda: tuple[str, ...]
    settings: dict[str, dict[str, Any]]
    patience: dict[str, float]
    modules: dict[str, Entry]
    symbols: dict[str, Entry]
    members: dict[str, Entry]
    tests: dict[str, Entry]
    deselect: dict[str, str]

    def absence(self, symbol: str) -> str | None:
        """Why `symbol` of upstream, or the module it is in, is not there; None: not explained."""
        entry = self.symbols.get(symbol) or self.module(symbol)
        return entry.absence if entry else None

    def module(self, name: str) -> Entry | None:
        """The entry of module `name`; an absence holds for everything under its name as well."""
        if name in self.modules:
            return self.modules[name]
        while "." in name:
            name = name.rpartition(".")[0]
            entry = self.modules.get(name)
            if entry is not None:
                return entry if entry.absence else None
        return None

    def member(self, name: str) -> str | None:
        """Why `Class.member` is not there; None: not explained."""
        entry = self.members.get(name)
        return entry.absence if entry else None

    def runs_as_cuda(self, file: str) -> bool:
        """Whether test file `file`, which skips itself off CUDA, is to run here all the same."""
        return any(fnmatchcase(file, pattern) for pattern in self.as_cuda)

    def settings_for(self, file: str) -> dict[str, Any]:
        """Arguments of every engine that test file `file` builds, unless it says otherwise."""
        return self.settings.get(file, {})

    def test(self, nodeid: str) -> str | None:
        """Why a test that ran and failed does not apply; None: it does."""
        for pattern, entry in self.tests.items():
            if fnmatchcase(_plain(nodeid), _plain(pattern)):
                return entry.absence
        return None

    def deselected(self, nodeid: str) -> str | None:
        """Why a test is not run; None: it is."""
        for pattern, reason in self.deselect.items():
            if fnmatchcase(_plain(nodeid), _plain(pattern)):
                return reason
        return None


def _plain(text: str) -> str:
    """Brackets belong to a test's id here; `*` is the only wild card."""
    return text.replace("[", "(").replace("]", ")")


def load_map(path: Path) -> UpstreamMap:
    """The map in `path`; MapError for an unknown key, an empty reason or a wrong type."""
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise MapError(f"{path.name}: not a mapping")
    for key in data:
        if key not in SECTIONS:
            raise MapError(f"{path.name}: unknown section {key!r}; there are {SECTIONS}")
    for name in MAPPINGS:
        if not isinstance(data.get(name) or {}, dict):
            raise MapError(f"{name}: not a mapping")
    sections = {
        name: {k: _entry(f"{name}.{k}", v) for k, v in (data.get(name) or {}).items()}
        for name in ("modules", "symbols", "members", "tests")
    }
    for name in ("members", "tests"):
        for key, entry in sections[name].items():
            if entry.absence is None:
                raise MapError(f"{name}.{key}: only an absence with its reason belongs here")
    return UpstreamMap(
        archive=_archive(data.get("archive", {})),
        suites=_texts("suites", data.get("suites", [])),
        as_cuda=_texts("as_cuda", data.get("as_cuda", [])),
        settings=_settings(data.get("settings") or {}),
        patience=_patience(data.get("patience") or {}),
        deselect={k: _text(f"deselect.{k}", v) for k, v in (data.get("deselect") or {}).items()},
        **sections,
    )


def _archive(data: dict[str, Any]) -> dict[str, str]:
    if data.keys() != {"requirement", "sha256"}:
        raise MapError("archive: give `requirement` and `sha256`, nothing else")
    return {key: _text(f"archive.{key}", value) for key, value in data.items()}


def _entry(where: str, value: Any) -> Entry:
    if isinstance(value, str):
        return Entry(targets=(value,))
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        return Entry(targets=tuple(value))
    if not isinstance(value, dict) or len(value) != 1:
        raise MapError(f"{where}: give dotted names, or one of adapter, constant, {ABSENCES}")
    ((kind, text),) = value.items()
    if kind == "constant":
        return Entry(constant=(text,))
    if kind == "adapter":
        return Entry(adapter=_text(where, text))
    if kind not in ABSENCES:
        raise MapError(f"{where}: unknown key {kind!r}")
    return Entry(absence=f"{kind}: {_text(where, text)}")


def _settings(data: Any) -> dict[str, dict[str, Any]]:
    for file, arguments in data.items():
        if not isinstance(arguments, dict) or not arguments:
            raise MapError(f"settings.{file}: give engine arguments and their values")
    return data


def _patience(data: Any) -> dict[str, float]:
    for file, factor in data.items():
        if not isinstance(factor, (int, float)) or not factor > 0:
            raise MapError(f"patience.{file}: give a factor above 0")
    return data


def _texts(where: str, values: Any) -> tuple[str, ...]:
    if not isinstance(values, list):
        raise MapError(f"{where}: give a list")
    return tuple(_text(where, value) for value in values)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise MapError(f"{where}: a reason or name is missing")
    return value.strip()
