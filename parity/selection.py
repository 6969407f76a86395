# SPDX-License-Identifier: Apache-2.0
"""Which goldens the words of `select=` name, and what is wrong with words that name none."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from vllmx.cli_args import did_you_mean
from vllmx.exceptions import UserError

from .model_table import MODELS
from .op_table import OPS

PREFIXES = {"model.": "models", "text.": "text", "schedule.": "schedule"}
"""Begin of a word -> the folder of goldens that it is about; any other is about ops."""


def by_kind(select: str | None, kinds: tuple[str, ...]) -> dict[str, str | None]:
    """Kind -> its words of `select`, joined again; without a `select` None for each of `kinds`."""
    if select is None:
        return dict.fromkeys(kinds)
    words: dict[str, list[str]] = defaultdict(list)
    for word in (part.strip() for part in select.split(",")):
        words[next((k for p, k in PREFIXES.items() if word.startswith(p)), "ops")].append(word)
    return {kind: ",".join(listed) for kind, listed in words.items()}


def op_names() -> set[str]:
    """What ops are called in `select=`: by feature or alone."""
    return {name for entry in OPS.values() for name in (entry.feature, entry.name)}


def golden_names() -> set[str]:
    """What ops, models and kinds of texts are called in `select=`."""
    from .text_replay import KINDS

    models = {entry.feature for entry in MODELS.values()}
    return op_names() | models | {f"text.{kind}" for kind in KINDS}


def check_words(select: str, names: Collection[str]) -> None:
    """UserError for a word of `select` that begins none of `names`, nor a case of one: nothing
    would be done for it, whatever the other words name."""
    for word in (part.strip() for part in select.split(",")):
        if not any(name.startswith(word) or word.startswith(f"{name}/") for name in names):
            hint = did_you_mean(word, names)
            raise UserError(f"parity.select: no golden's name begins with {word!r}.{hint}")


def check_oracle(oracle: str, known: Collection[str]) -> None:
    """UserError for an oracle that no golden is asked of."""
    if oracle not in known:
        hint = did_you_mean(oracle, known)
        listed = ", ".join(sorted(known))
        raise UserError(
            f"parity.oracle={oracle}: no golden is asked of it; the oracles are {listed}.{hint}"
        )
