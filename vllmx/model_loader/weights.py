# SPDX-License-Identifier: Apache-2.0
"""One iterator over a checkpoint's weights, whichever format they are in."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError, UserError, WeightError
from vllmx.model_loader.gguf_loader import GGUFTensor, iterate_gguf
from vllmx.model_loader.gguf_reader import GGUFReader
from vllmx.model_loader.pt_file import iterate_pt, pt_file
from vllmx.model_loader.resolve import is_gguf
from vllmx.model_loader.safetensors_loader import file_of, iterate_safetensors

__all__ = ["GGUFTensor", "iterate_weights", "with_file"]


def iterate_weights(vllm_config: VllmConfig) -> Iterator[tuple[str, torch.Tensor | GGUFTensor]]:
    """Yield (HF name, weight) of the resolved model, read from disk as it is consumed.

    Tensors are mapped from the file: copy what is kept. Quantised GGUF weights come as
    GGUFTensor. Shows a progress bar on stderr where load.use_tqdm_on_load is set.
    """
    path = Path(vllm_config.model_config.model)
    if vllm_config.load_config.load_format == "dummy":
        raise UserError("load.load_format=dummy has no weights to read.")
    if is_gguf(path):
        reader = vllm_config.model_config.hf_config.gguf or GGUFReader(path)
        weights = iterate_gguf(reader, vllm_config.model_config.hf_text_config)
        total = len(reader.tensors)
    elif file := pt_file(path):
        weights = iterate_pt(file)
        total = None
    else:
        weights = iterate_safetensors(path)
        total = None
    yield from tqdm(
        weights,
        desc="Loading weights",
        total=total,
        unit="tensor",
        file=sys.stderr,
        leave=False,
        disable=None if vllm_config.load_config.use_tqdm_on_load else True,
    )


def with_file(error: CheckpointError, vllm_config: VllmConfig) -> CheckpointError:
    """`error`, met while loading, with the file of its weight in front where it names none."""
    path = Path(vllm_config.model_config.model)
    if str(path) in str(error):
        return error
    if not is_gguf(path):
        name = error.weight if isinstance(error, WeightError) else None
        path = pt_file(path) or file_of(path, name)
    return CheckpointError(f"{path}: {error}")
