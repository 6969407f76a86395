# SPDX-License-Identifier: Apache-2.0
"""Folders that oracles and vllmx load a model from, made once and kept outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from .golden import GoldenError
from .model_table import ModelEntry
from .oracle_process import OracleBlocked, python_of

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "vllmx" / "checkpoints"


def tiny_folder(entry: ModelEntry) -> Path:
    """The checkpoint of a tiny model; its weights are drawn anew where it is not there."""
    from oracles import tiny_checkpoint

    return _made(
        entry.name, Path(tiny_checkpoint.__file__), ["oracles.tiny_checkpoint", entry.name]
    )


def oracle_folder(entry: ModelEntry) -> Path:
    """A float32 checkpoint of a model that upstream and transformers load.

    OracleBlocked where the model itself is not here.
    """
    if entry.tiny:
        return tiny_folder(entry)
    from oracles import gguf_checkpoint

    source = gguf_file(entry)
    return _made(
        f"{entry.name}-f32",
        Path(gguf_checkpoint.__file__),
        ["oracles.gguf_checkpoint", str(source)],
    )


def gguf_file(entry: ModelEntry) -> Path:
    """The GGUF file of a named model in the cache of `vllmx fetch`."""
    from vllmx.model_loader.fetch import default_download_dir

    found = sorted((default_download_dir() / entry.name).glob("*.gguf"))
    if not found:
        raise OracleBlocked(f"{entry.name} is not here; run `vllmx fetch {entry.name}`")
    return found[0]


def _made(name: str, maker: Path, command: list[str]) -> Path:
    """The folder `name`, made by a module of oracles/ unless it is there and newer than that."""
    folder = CACHE / name
    done = folder / "model.safetensors"
    if done.is_file() and done.stat().st_mtime >= maker.stat().st_mtime:
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        made = Path(work) / name
        argv = [python_of("hf_model"), "-m", *command, str(made)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise GoldenError(f"{' '.join(command)}: {run.stderr[-1000:]}")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder
