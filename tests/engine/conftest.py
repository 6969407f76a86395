# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the engine's tests."""

import pytest


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """The tokenizer in SmolLM2's GGUF file, which is fetched if it is not in the cache."""
    return _tokenizer("smollm2-135m")


@pytest.fixture(scope="session", params=["smollm2-135m", "gemma3-270m"])
def real_tokenizer(request):
    """A byte-level and a SentencePiece tokenizer of real models."""
    if request.param == "smollm2-135m":
        return request.getfixturevalue("smollm2_tokenizer")
    return _tokenizer(request.param)


def _tokenizer(model: str):
    from vllmx.config import finalize
    from vllmx.engine.arg_utils import engine_args_to_config
    from vllmx.model_loader.resolve import resolve_model
    from vllmx.model_loader.tokenizer import get_tokenizer

    config = finalize(engine_args_to_config(model=model))
    resolve_model(config)
    return get_tokenizer(config)
