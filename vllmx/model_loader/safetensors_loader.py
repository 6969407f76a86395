# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/model_loader/weight_utils.py @ v0.25.0
"""Iterates the weights of a folder with safetensors files, single or sharded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from vllmx.exceptions import CheckpointError, ModelNotFoundError
from vllmx.model_loader.file_form import is_pt
from vllmx.model_loader.pt_file import FILE
from vllmx.models.hf_config import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NOT_OURS = ("consolidated", "adapter_model")


def weight_files(folder: Path) -> dict[Path, list[str] | None]:
    """Files of `folder` to read, each with the tensors to take from it (None: all of them).

    An index is the only authority where there is one. Without it a lone model.safetensors is
    taken, else every *.safetensors but Mistral's consolidated and adapter files.
    """
    index = folder / INDEX
    if index.is_file():
        return _indexed_files(folder, index)
    if (folder / SINGLE).is_file():
        return {folder / SINGLE: None}
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith(NOT_OURS))
    if not files:
        raise ModelNotFoundError(
            f"{folder} holds no {SINGLE}, no {INDEX} and no other weights in safetensors form."
        )
    return dict.fromkeys(files)


def file_of(folder: Path, name: str | None) -> Path:
    """The file that tensor `name` comes from; where no file, or not one alone, does, the index,
    and `folder` without one."""
    files = weight_files(folder)
    if len(files) == 1:
        return next(iter(files))
    for path, wanted in files.items():
        if name is None:
            break
        if wanted is None:
            with safe_open(path, framework="pt") as file:
                wanted = file.keys()
        if name in wanted:
            return path
    index = folder / INDEX
    return index if index.is_file() else folder


def iterate_safetensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every weight of `folder`, one file after the other, mapped.

    Raises CheckpointError for a truncated or corrupt file, a missing shard, a tensor that the
    index promises and the shard lacks, and a name that two files without an index share.
    """
    seen: dict[str, Path] = {}
    for path, wanted in weight_files(folder).items():
        try:
            with safe_open(path, framework="pt") as file:
                present = file.keys()
                for name in present if wanted is None else wanted:
                    if wanted is not None and name not in present:
                        raise CheckpointError(f"{path}: tensor {name!r} of {INDEX} is not there.")
                    if name in seen:
                        raise CheckpointError(
                            f"tensor {name!r} is in {seen[name]} and in {path.name}, and there is "
                            f"no {INDEX} to say which counts: remove one of the files."
                        )
                    seen[name] = path
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            if is_pt(path):
                raise CheckpointError(
                    f"{path} is no safetensors file, whatever it is called, but one of torch.save: "
                    f"get it as safetensors, or rename it to {FILE} if the folder has no other."
                ) from error
            raise CheckpointError(
                f"{path} is truncated or corrupt ({error}): get it again."
            ) from error


def _indexed_files(folder: Path, index: Path) -> dict[Path, list[str] | None]:
    mapping = read_json(index).get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty.")
    files: dict[Path, list[str] | None] = {}
    for name, file in mapping.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index}: {name!r} maps to {file!r}, not to a file name.")
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(files)} shards named in {INDEX} are missing, first "
            f"{missing[0]}."
        )
    return files
