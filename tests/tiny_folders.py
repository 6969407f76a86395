# SPDX-License-Identifier: Apache-2.0
"""Folders of tiny checkpoints, as they are and changed."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from vllmx.tiny.checkpoint import save


def in_folder(root: Path) -> Callable[[str], Path]:
    """Name -> the folder of a tiny checkpoint below `root`, written when it is asked for."""

    def folder(name: str) -> Path:
        if not (root / name).exists():
            save(name, root / name)
        return root / name

    return folder


def changed(source: Path, target: Path, **config: object) -> Path:
    """A copy whose config says something else."""
    shutil.copytree(source, target)
    said = json.loads((source / "config.json").read_text()) | config
    (target / "config.json").write_text(json.dumps(said))
    return target
