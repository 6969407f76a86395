# SPDX-License-Identifier: Apache-2.0
"""Whether a row of evidence speaks of what is here now, and whether what it says proves it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from . import libraries
from .evidence import Row

if TYPE_CHECKING:
    from .status import Cell

ANY = "auto"
"""Provider of a model's cell that may choose any for each op."""


@dataclass(frozen=True)
class Expected:
    """What evidence must be of to speak of what is here now."""

    closure: Mapping[str, str]
    golden_sha: str
    policy_sha: str | None
    floor_sha: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    """Library -> version that is wanted on the cell's device."""
    deciding: tuple[str, ...] = ()

    def cause(self, row: Row) -> str:
        """Why `row` is of something else; empty if it is not."""
        if row["closure"].get("fine") != self.closure["fine"]:
            return "the code has changed"
        if row["golden_sha"] != self.golden_sha:
            return "the golden has changed"
        if self.policy_sha is not None and row["policy_sha"] != self.policy_sha:
            return "the limits have changed"
        if self.floor_sha is not None and row["oracle"].get("floor", "") != self.floor_sha:
            return "the oracle's noise, of which the limits are multiples, has changed"
        return libraries.cause(self.versions, self.deciding, row["run"])


def superseded(row: Row, current: Sequence[Row], closure: Mapping[str, str]) -> bool:
    """Whether code outside the fine closure changed after a failure, and a clean run passed then.

    Without a change a later pass takes nothing back: what fails now and then is broken.
    """
    if row["closure"].get("coarse") == closure.get("coarse"):
        return False
    return any(
        other["verdict"] == "pass"
        and not other["run"].get("dirty", True)
        and other["ts"] > row["ts"]
        and other["closure"].get("coarse") != row["closure"].get("coarse")
        for other in current
    )


def weakness(cell: Cell, row: Row) -> str:
    """Why a pass proves nothing; empty if it does."""
    if toothless := sorted(name for name, caught in row["teeth"].items() if not caught):
        return f"the case is degenerate: it lets {', '.join(toothless)} pass"
    if cell.kind == "op":
        selected = row["proof"].get("selected")
        if selected != cell.provider:
            return f"asked for provider {cell.provider}, {selected or 'an unknown one'} ran"
    if cell.kind == "model":
        chosen = row["proof"].get("selected") or {}
        others = {op for op, name in chosen.items() if cell.provider not in (name, ANY)}
        if not chosen or others:
            told = ", ".join(sorted(others)) or "no op"
            return f"asked for provider {cell.provider}, another one served {told}"
    if fallbacks := row["proof"].get("fallbacks"):
        return f"the provider fell back: {fallbacks}"
    return ""


def why(row: Row) -> str:
    """The reason that a row gives."""
    return str(row.get("reason", row["verdict"]))


def when(row: Row) -> dt.datetime:
    """The time of a row."""
    return dt.datetime.fromisoformat(row["ts"])
