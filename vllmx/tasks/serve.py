# SPDX-License-Identifier: Apache-2.0
"""`vllmx serve`: the OpenAI-compatible server."""

from __future__ import annotations

from vllmx.config import RunConfig, finalize
from vllmx.tasks.local import require_model


def run(config: RunConfig, started: float) -> int:
    """Serve until SIGTERM or SIGINT; running requests are finished first."""
    require_model(config)
    from vllmx.entrypoints.openai.api_server import run_server

    return run_server(finalize(config), config.server)
