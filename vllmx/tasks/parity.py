# SPDX-License-Identifier: Apache-2.0
"""`vllmx parity`: hands over to parity/ of a checkout, which a wheel does not hold."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from vllmx.config import RunConfig
from vllmx.exceptions import UserError


def run(config: RunConfig, started: float) -> int:
    """Run `parity.run(config)`; UserError naming what is missing where there is no such package."""
    return load_parity(Path(__file__).parents[2]).run(config)


def load_parity(root: Path) -> ModuleType:
    """The package `root`/parity under the name vllmx._parity, which no other package can take."""
    file = root / "parity" / "__init__.py"
    if not file.is_file() and (root / "pyproject.toml").is_file():
        raise UserError(f"the parity commands are not built yet: there is no {file}.")
    if not file.is_file():
        raise UserError(
            f"parity needs a checkout: there is no {file}; clone the repository and "
            "`pip install -e .` in it."
        )
    name = "vllmx._parity"
    loaded = sys.modules.get(name)
    if loaded is None or loaded.__file__ != str(file):
        # Another checkout's may be loaded: its parts must not mix with this one's.
        for other in [module for module in sys.modules if module.startswith(f"{name}.")]:
            del sys.modules[other]
        spec = importlib.util.spec_from_file_location(
            name, file, submodule_search_locations=[str(file.parent)]
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
