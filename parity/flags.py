# SPDX-License-Identifier: Apache-2.0
"""Which keys of ParityConfig each verb reads; one that it does not is refused, not ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from vllmx.cli_args import flags
from vllmx.config import ParityConfig
from vllmx.exceptions import UserError

READS: Mapping[str, frozenset[str]] = {
    "census": frozenset({"from_version", "to_version", "check", "json", "output_dir"}),
    "record": frozenset({"select", "oracle", "minutes", "check"}),
    "calibrate": frozenset({"select", "oracle", "check"}),
    "replay": frozenset({"select", "provider", "minutes", "json", "output_dir"}),
    "probe": frozenset({"select", "provider", "minutes", "output_dir"}),
    "bisect": frozenset({"select", "provider"}),
    "mutate": frozenset({"select", "minutes", "check", "output_dir"}),
    "collect": frozenset({"select", "tier", "from_version", "minutes", "output_dir"}),
    "ledger": frozenset({"select", "tier", "check", "json", "output_dir"}),
    "plan": frozenset({"select", "tier", "json"}),
    "report": frozenset({"check", "json", "output_dir"}),
    "explain": frozenset({"select"}),
    "budget": frozenset(),
    "upstream-tests": frozenset({"select", "output_dir"}),
}
NOT_TOGETHER = {
    ("ledger", "check"): ("select", "tier", "json"),
    ("census", "check"): ("to_version", "json"),
    ("mutate", "check"): ("output_dir",),
}
"""(verb, key) -> keys that the verb does not read where that one is set."""
ONLY_WITH = {("census", "json"): "to_version", ("record", "minutes"): "check"}
"""(verb, key) -> the key without which the verb does not read it."""


def check(options: ParityConfig) -> None:
    """UserError for a key that is set and that the verb of `options` would not read."""
    verb, default = str(options.verb), ParityConfig()
    given = {
        field.name
        for field in fields(options)
        if field.name != "verb" and getattr(options, field.name) != getattr(default, field.name)
    }
    for key in sorted(given - READS[verb]):
        having = ", ".join(name for name in READS if key in READS[name])
        raise UserError(f"parity {verb} does not read {option(key)}; the verbs that do: {having}.")
    for (name, key), others in NOT_TOGETHER.items():
        if name == verb and key in given and (both := sorted(given & set(others))):
            raise UserError(
                f"parity {verb} {option(key)} does not read {option(both[0])}; leave one out."
            )
    for (name, key), other in ONLY_WITH.items():
        if name == verb and key in given and other not in given:
            raise UserError(f"parity {verb} reads {option(key)} only with {option(other)}.")


def option(key: str) -> str:
    """The flag of a key of ParityConfig."""
    return next(f.option for f in flags().values() if f.field.key == f"parity.{key}")
