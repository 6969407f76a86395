# SPDX-License-Identifier: Apache-2.0
"""Comparisons with the references: `vllmx parity VERB [overrides]`, from a checkout.

A verb is a module of this package with a function `run(config: RunConfig) -> int`. Its exit code
is 0: all is as expected; 1: something differs; 2: invalid or missing; 3: blocked.
"""

from __future__ import annotations

from importlib import import_module, util

from vllmx.config import PARITY_VERBS, RunConfig
from vllmx.exceptions import UserError


def run(config: RunConfig) -> int:
    """Run the verb of `config.parity`; UserError if there is none, or for a key that it would not
    read."""
    verb = config.parity.verb
    if verb is None:
        raise UserError(f"vllmx parity needs a verb: one of {', '.join(PARITY_VERBS)}.")
    name = f"{__name__}.{verb.replace('-', '_')}"
    if util.find_spec(name) is None:
        raise UserError(
            f"vllmx parity {verb}: this checkout has no parity/{name.split('.')[-1]}.py."
        )
    from .flags import check

    check(config.parity)
    module = import_module(name)
    from .evidence import EvidenceError
    from .golden import GoldenError
    from .oracle_process import OracleBlocked
    from .policy import PolicyError

    try:
        return int(module.run(config))
    except OracleBlocked as error:
        print(f"parity {verb}: blocked: {error}")
        return 3
    except (EvidenceError, GoldenError, PolicyError) as error:
        raise UserError(f"parity {verb}: {error}") from error
