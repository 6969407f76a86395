# SPDX-License-Identifier: Apache-2.0
"""`vllmx checkpoint KIND model=NAME [output_dir=FOLDER]`: a model that is made, not fetched.

tiny: seeded weights of a small size; moe: a Llama's own weights as a Mixtral's experts.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from vllmx.cli_args import did_you_mean
from vllmx.config import RunConfig, finalize
from vllmx.exceptions import UserError
from vllmx.tiny.checkpoint import save
from vllmx.tiny.configs import FAMILIES
from vllmx.tiny.margins import SUFFIX


def run(config: RunConfig, started: float) -> int:
    """Write the checkpoint and print its folder; UserError for a model that can't be made, and for
    a folder that has something in it."""
    kinds = {"tiny": _tiny, "moe": _moe}
    name, write = kinds[config.checkpoint.kind](config)
    folder = Path(config.checkpoint.output_dir or name).expanduser().absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"output_dir={folder} is there and not an empty folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / name
        write(made)
        if folder.exists():
            folder.rmdir()
        shutil.move(made, folder)
    print(folder)
    return 0


def _tiny(config: RunConfig) -> tuple[str, Callable[[Path], None]]:
    """Name of a tiny model, and what writes it."""
    given = config.model.model or ""
    name = given if given.startswith("tiny-") else f"tiny-{given}"
    if name not in FAMILIES:
        if (base := name.removesuffix(SUFFIX)) in FAMILIES:
            raise UserError(
                f"model={given}: {base} has no router whose choice bfloat16 could change; models "
                f"NAME{SUFFIX} are of those that have one. Use model={base}."
            )
        raise UserError(
            f"model={given}: no tiny model of that name; choose one of "
            f"{', '.join(sorted(FAMILIES))}.{did_you_mean(name, FAMILIES)}"
        )
    return name, lambda folder: save(name, folder)


def _moe(config: RunConfig) -> tuple[str, Callable[[Path], None]]:
    """Name of a model with the config's model cut into experts, and what writes it."""
    from vllmx.model_loader.resolve import resolve_model
    from vllmx.tiny.experts import save_sparse

    vllm_config = finalize(config)
    resolve_model(vllm_config)
    name = Path(config.model.name or config.model.model or "model").name
    return f"{name}-moe", lambda folder: save_sparse(vllm_config, folder)
