# SPDX-License-Identifier: Apache-2.0
"""The import map over sys.modules: each of upstream's module names becomes a facade."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from . import adapters
from .mapping import Entry, UpstreamMap
from .placeholder import missing


def resolve(target: str) -> Any:
    """The module, class or value of dotted name `target`; ImportError or AttributeError."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not target.startswith(error.name):
                raise
            continue
        for name in parts[length:]:
            value = getattr(value, name)
        return value
    raise ImportError(f"no module for {target}")


class Facade(ModuleType):
    """One of upstream's modules: looks names up in vllmx, and patches them there."""

    def __init__(self, name: str, upstream_map: UpstreamMap) -> None:
        super().__init__(name)
        entry = upstream_map.modules.get(name) or Entry()
        self.__dict__["_owners"] = [resolve(target) for target in entry.targets]
        self.__dict__["_map"] = upstream_map
        self.__dict__["_before"] = {}
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        symbol = f"{self.__name__}.{name}"
        entry = self._map.symbols.get(symbol)
        if entry is not None and entry.absence is None:
            return _value(entry)
        for owner in self._owners:
            if hasattr(owner, name):
                return getattr(owner, name)
        return missing(symbol)

    def __setattr__(self, name: str, value: Any) -> None:
        owners = [owner for owner in self._owners if name in vars(owner)]
        if name.startswith("__") or isinstance(value, ModuleType) or not owners:
            super().__setattr__(name, value)
            return
        self._before.setdefault(name, [(owner, getattr(owner, name)) for owner in owners])
        for owner in owners:
            setattr(owner, name, value)

    def __delattr__(self, name: str) -> None:
        """Take a patch back, as unittest.mock does by deleting it."""
        if name in self.__dict__:
            super().__delattr__(name)
            return
        for owner, value in self._before.pop(name, []):
            setattr(owner, name, value)


def _value(entry: Entry) -> Any:
    if entry.constant is not None:
        return entry.constant[0]
    if entry.adapter is not None:
        return getattr(adapters, entry.adapter)
    return resolve(entry.targets[0])


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds upstream's package, and those of its test helpers that the map names."""

    def __init__(self, upstream_map: UpstreamMap) -> None:
        self.map = upstream_map

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for a name under `vllm`, or for a mapped module; None for any other."""
        if name.split(".")[0] == "vllm" or name in self.map.modules:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The facade."""
        return Facade(spec.name, self.map)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is to be run."""


def install(upstream_map: UpstreamMap) -> None:
    """Put the map before every other way to find a module."""
    adapters.prepare()
    sys.meta_path.insert(0, Finder(upstream_map))
