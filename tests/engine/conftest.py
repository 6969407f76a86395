# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine's tests."""

import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The tokenizer in SmolLM2's GGUF file, which is fetched if it is not in the cache."""
    from vllmx.config import finalize
    from vllmx.engine.arg_utils import engine_args_to_config
    from vllmx.model_loader.resolve import resolve_model
    from vllmx.model_loader.tokenizer import get_tokenizer

    config = finalize(engine_args_to_config(model="smollm2-135m"))
    resolve_model(config)
    return get_tokenizer(config)
