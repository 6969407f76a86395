# SPDX-License-Identifier: Apache-2.0
"""Which kinds of goldens the words of `select=` name."""

from __future__ import annotations

from collections import defaultdict

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
