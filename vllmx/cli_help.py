# SPDX-License-Identifier: Apache-2.0
"""The text of --help, made out of the flag table and the docstrings in vllmx/config.py."""

from __future__ import annotations

import textwrap

from vllmx.cli_args import HUMAN_READABLE, SHORT, Flag, flags
from vllmx.config import PARITY_VERBS

WORDS = {"bench": "KIND [MODEL]", "checkpoint": "KIND MODEL", "parity": "VERB [SELECT]"}
USAGE = "vllmx <command> [MODEL] [flags] [key=value ...] [-m]"


def overview(commands: dict[str, str]) -> str:
    """The help of `vllmx` alone."""
    lines = [f"usage: {USAGE}", "", "commands:"]
    lines += [f"  {name:<10} {words}" for name, words in commands.items()]
    lines += [
        "",
        "MODEL is a name in conf/model or a path. `vllmx <command> --help` lists its flags;",
        "`--cfg job` prints the config that a command line makes; -m runs every combination of",
        "the values in key=a,b. `--config FILE.yaml` reads flags from a file.",
    ]
    return "\n".join(lines)


def command_help(command: str, summary: str, search: str = "") -> str:
    """The help of one command; `search` keeps the flags whose name or group contains it."""
    from vllmx import compose

    shown: dict[str, list[Flag]] = {}
    for flag in flags().values():
        if command in flag.commands:
            leaf = "." not in flag.field.key and flag.field.kind != "node"
            node = "input" if leaf else flag.field.key.split(".")[0]
            word = search.lower().replace("-", "_")
            if search in ("", "all") or word in flag.name or word == node:
                shown.setdefault(node, []).append(flag)
    words = WORDS.get(command, "[MODEL]")
    usage = f"usage: vllmx {command} {words} [flags] [key=value ...] [-m]"
    lines = [usage, "", f"{summary}."]
    if command == "parity":
        lines += textwrap.wrap(f"VERB is one of {', '.join(PARITY_VERBS)}.", 98)
    for node, entries in shown.items():
        lines += ["", f"{node}:"]
        for flag in entries:
            lines += _entry(flag)
    if not shown:
        lines += ["", f"no flag of {command} contains {search!r}."]
    lines += ["", "config groups (group=choice):"]
    lines += [f"  {group}: {', '.join(compose.choices(group))}" for group in compose.groups()]
    return "\n".join(lines)


def _entry(flag: Flag) -> list[str]:
    spec = flag.field
    short = [key for key, name in SHORT.items() if name == flag.name]
    head = ", ".join([*short, flag.option])
    if spec.kind == "bool":
        head += "" if flag.inverted else f", --no-{flag.option[2:]}"
    elif spec.choices:
        head += " {" + ",".join(str(choice) for choice in spec.choices) + "}"
    else:
        word = {"dict": "JSON", "node": "JSON", "str": "TEXT"}.get(spec.kind, spec.kind)
        head += f" {word.upper()}" if "[" not in word else f" {word[5:-1].upper()} ..."
    doc = f"{spec.doc} [{spec.key}{_default(flag)}]"
    if spec.key in HUMAN_READABLE:
        doc = f"{spec.doc} 4k is 4000, 4K is 4096. [{spec.key}]"
    return [f"  {head}", *textwrap.wrap(doc, 92, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def _default(flag: Flag) -> str:
    default = flag.field.default
    if isinstance(default, (str, int, float)) and default != "":
        return f"={str(default).lower() if isinstance(default, bool) else default}"
    return ""
