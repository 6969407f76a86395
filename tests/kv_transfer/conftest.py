# SPDX-License-Identifier: Apache-2.0
"""A tiny model for the engines of these tests."""

import pytest
from checkpoints import save_tiny


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory):
    """Folder of a tiny checkpoint."""
    folder = tmp_path_factory.mktemp("llama")
    save_tiny("llama", folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory):
    """Folder of a tiny checkpoint whose layers are of two kinds."""
    folder = tmp_path_factory.mktemp("gemma3")
    save_tiny("gemma3", folder)
    return folder
