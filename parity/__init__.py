# SPDX-License-Identifier: Apache-2.0
"""Comparisons with the references: `vllmx parity VERB [select=...]`, from a checkout."""

from __future__ import annotations

from vllmx.config import RunConfig
from vllmx.exceptions import UserError

VERBS = ("upstream-tests",)


def run(config: RunConfig) -> int:
    """Run the verb. Exit code 0: all is as expected; 1: something differs; 2: nothing was shown."""
    verb = config.parity.verb
    if verb != "upstream-tests":
        raise UserError(f"parity: no verb {verb!r}; choose one of {', '.join(VERBS)}.")
    from .upstream_tests import run_selected

    return run_selected(config.parity.select, config.parity.output_dir)
