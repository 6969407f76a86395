# SPDX-License-Identifier: Apache-2.0
"""`vllmx checkpoint tiny model=NAME [output_dir=FOLDER]`: a small model with seeded weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.tiny.checkpoint import save
from vllmx.tiny.configs import FAMILIES


def run(config: RunConfig, started: float) -> int:
    """Write the checkpoint and print its folder; UserError for a model that is none, and for a
    folder that has something in it."""
    given = config.model.model or ""
    name = given if given.startswith("tiny-") else f"tiny-{given}"
    if name not in FAMILIES:
        raise UserError(
            f"model={given}: no tiny model of that name; choose one of "
            f"{', '.join(sorted(FAMILIES))}.{did_you_mean(name, FAMILIES)}"
        )
    folder = Path(config.checkpoint.output_dir or name).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir={folder} is there and not an empty folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / name
        save(name, made)
        if folder.exists():
            folder.rmdir()
        shutil.move(made, folder)
    print(folder)
    return 0
