# SPDX-License-Identifier: Apache-2.0
"""Folders that oracles and vllmx load a model from, made once and kept outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from .golden import GoldenError
from .model_table import ModelEntry
from .oracle_process import OracleBlocked, python_of, search_path

ROOT = Path(__file__).resolve().parents[1]
CACHE = Path.home() / ".cache" / "vllmx" / "checkpoints"


def tiny_folder(entry: ModelEntry) -> Path:
    """The checkpoint of a tiny model; its weights are drawn anew where it is not there."""
    from vllmx.tiny import checkpoint

    makers = list(Path(str(checkpoint.__file__)).parent.glob("*.py"))
    return _made(entry.name, makers, lambda made: checkpoint.save(entry.name, made))


def oracle_folder(entry: ModelEntry) -> Path:
    """A float32 checkpoint of a model that upstream and transformers load.

    OracleBlocked where the model itself is not here.
    """
    if entry.tiny:
        return tiny_folder(entry)
    from oracles import gguf_checkpoint

    source = weights_file(entry)
    if source.suffix != ".gguf":
        return source.parent

    def convert(made: Path) -> None:
        argv = [python_of("hf_model"), "-m", "oracles.gguf_checkpoint", str(source), str(made)]
        environment = {**os.environ, "PYTHONPATH": search_path("hf_model")}
        run = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True)
        if run.returncode:
            raise GoldenError(f"oracles.gguf_checkpoint {source}: {run.stderr[-1000:]}")

    return _made(f"{entry.name}-f32", [Path(gguf_checkpoint.__file__)], convert)


def weights_file(entry: ModelEntry) -> Path:
    """The file that holds a model's weights here; OracleBlocked without one."""
    return tiny_folder(entry) / "model.safetensors" if entry.tiny else gguf_file(entry)


def gguf_file(entry: ModelEntry) -> Path:
    """The file of a named model, GGUF most often, in the cache of `vllmx fetch`."""
    from vllmx.model_loader.fetch import default_download_dir

    folder = default_download_dir() / entry.name
    found = [path for name in ("*.gguf", "pytorch_model.bin") for path in folder.glob(name)]
    if not found:
        raise OracleBlocked(f"{entry.name} is not here; run `vllmx fetch {entry.name}`")
    return found[0]


def _made(name: str, makers: list[Path], make: Callable[[Path], None]) -> Path:
    """The folder `name`, made by `make` unless it is there and newer than all of `makers`."""
    folder = CACHE / name
    done = folder / "model.safetensors"
    changed = max(maker.stat().st_mtime for maker in makers)
    if done.is_file() and done.stat().st_mtime >= changed:
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        made = Path(work) / name
        make(made)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder
