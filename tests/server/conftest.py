# SPDX-License-Identifier: Apache-2.0
"""One scripted engine and its server, started once and reset for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server import helpers

from vllmx.config import ServerConfig
from vllmx.entrypoints.openai.api_server import build_app


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights."""
    return helpers.write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def _served(model_folder: Path) -> Iterator[tuple[helpers.EngineDouble, str]]:
    engine = helpers.EngineDouble(model_folder)
    app = build_app(engine, engine.vllm_config, ServerConfig())
    with helpers.running_server(app) as url:
        yield engine, url


@pytest.fixture
def engine(_served: tuple[helpers.EngineDouble, str]) -> helpers.EngineDouble:
    """The scripted engine behind `url`, as new."""
    engine = _served[0]
    engine.reset()
    return engine


@pytest.fixture
def url(engine: helpers.EngineDouble, _served: tuple[helpers.EngineDouble, str]) -> str:
    """URL of the server over the scripted engine."""
    return _served[1]


@pytest.fixture(scope="session")
def letters_url(model_folder: Path) -> Iterator[str]:
    """A server over the real engine; its worker checks the scheduler at each step."""
    yield from helpers.served(model_folder, "LetterWorker")


@pytest.fixture(scope="session")
def slow_url(model_folder: Path) -> Iterator[str]:
    """A server over the real engine with 20 ms a step."""
    yield from helpers.served(model_folder, "SlowWorker")
