# SPDX-License-Identifier: Apache-2.0
"""Tiny GGUF files written with the `gguf` package, and the real models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from vllmx.compose import compose_run
from vllmx.config import RunConfig, VllmConfig, finalize
from vllmx.model_loader.fetch import fetch

torch.set_num_threads(1)

Tensors = dict[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]]


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes metadata and tensors to a file; keys with a leading dot get the architecture."""

    def write(
        tensors: Tensors | None = None,
        metadata: dict[str, Any] | None = None,
        arch: str = "llama",
        name: str = "tiny.gguf",
        alignment: int | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        for key, value in (metadata or {}).items():
            add_value(writer, arch + key if key.startswith(".") else key, value)
        for tensor, data in (tensors or {}).items():
            if isinstance(data, tuple):
                writer.add_tensor(tensor, data[0], raw_dtype=data[1])
            else:
                writer.add_tensor(tensor, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


SIZES = {
    ".block_count": 1,
    ".context_length": 128,
    ".embedding_length": 32,
    ".feed_forward_length": 64,
    ".attention.head_count": 8,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".rope.freq_base": 10000.0,
}


@pytest.fixture
def sizes() -> dict[str, Any]:
    """Metadata of a tiny model: hidden 32, 8 heads, 2 kv heads, one layer."""
    return dict(SIZES)


@pytest.fixture
def config_for() -> Callable[..., VllmConfig]:
    """A finalized config for a path; keyword arguments are fields of model or load."""

    def make(model: str | Path = "", **fields: Any) -> VllmConfig:
        run = RunConfig()
        run.model.model = str(model)
        run.load.use_tqdm_on_load = False
        for key, value in fields.items():
            setattr(run.load if hasattr(run.load, key) else run.model, key, value)
        return finalize(run)

    return make


@pytest.fixture(scope="session")
def real_model() -> Callable[[str], Path]:
    """Path of a real model by its name in conf/model, fetched into the cache where absent."""

    def path_of(name: str) -> Path:
        source = compose_run([f"model={name}"]).model.source
        assert source is not None
        return fetch(source, progress=False, name=name)

    return path_of
