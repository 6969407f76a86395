# SPDX-License-Identifier: Apache-2.0
"""Installed packages with plugins: folders with a module and its dist-info, on sys.path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vllmx import plugins
from vllmx.registry import ModelRegistry


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process that has loaded no plugin and knows no model but vllmx's."""
    monkeypatch.setattr(plugins, "_loaded", False)
    monkeypatch.setattr(ModelRegistry, "registered", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """install("name", source, plugin="function") -> the folder it lies in."""

    def make(name: str, source: str, **functions: str) -> Path:
        folder = tmp_path / "site" / name
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (folder / f"{name}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = "".join(
            f"{plugin} = {name}:{function}\n" for plugin, function in functions.items()
        )
        (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{points}")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return folder

    return make
