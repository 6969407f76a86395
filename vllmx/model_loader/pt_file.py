# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/model_loader/weight_utils.py @ v0.25.0
"""Iterates the weights of a folder whose only weights are a pytorch_model.bin.

Such a file is a pickle. It is read by torch's reader that makes tensors and nothing else: a file
that asks for any other object is refused, and none of its code is ever run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from vllmx.exceptions import CheckpointError
from vllmx.model_loader.file_form import is_safetensors, is_zip

if TYPE_CHECKING:
    import torch

FILE = "pytorch_model.bin"
SAFETENSORS = "*.safetensors"


def pt_file(folder: Path) -> Path | None:
    """pytorch_model.bin of `folder`; None without it, or where there are safetensors as well."""
    file = folder / FILE
    return file if file.is_file() and not any(folder.glob(SAFETENSORS)) else None


def iterate_pt(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for every weight of `file`, mapped.

    Raises CheckpointError for a file that is no mapping of names to tensors, is corrupt, holds
    objects that are no tensors, or is of safetensors under this name.
    """
    import pickle

    import torch

    if is_safetensors(file):
        raise CheckpointError(
            f"{file} holds safetensors, whatever it is called: rename it to model.safetensors."
        )
    try:
        # Files of before torch 1.6 can't be mapped.
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip(file))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{file} is corrupt, or holds objects other than tensors, which vllmx never loads: get "
            f"it as safetensors ({str(error).splitlines()[0]})."
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise CheckpointError(f"{file} is truncated or corrupt ({error}): get it again.") from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise CheckpointError(f"{file} is no mapping of names to tensors.")
    yield from found.items()
