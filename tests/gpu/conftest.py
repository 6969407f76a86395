# SPDX-License-Identifier: Apache-2.0
"""Tests that need a GPU: `pytest tests/gpu`, alone, since the others run Triton's interpreter."""

import os

import pytest
import torch

os.environ.pop("TRITON_INTERPRET", None)
if not torch.cuda.is_available():
    raise pytest.UsageError(
        "tests/gpu needs an NVIDIA GPU that torch can see; the rest of tests/ runs anywhere"
    )


@pytest.fixture(scope="module", params=["llama", "qwen3", "gemma3"])
def folder(request, tmp_path_factory):
    """A tiny checkpoint in float32."""
    from checkpoints import save_tiny

    path = tmp_path_factory.mktemp("tiny") / request.param
    save_tiny(request.param, path)
    return path
