# SPDX-License-Identifier: Apache-2.0
"""Evidence and ledger as pandas tables, for looking at them in a notebook.

    from parity.tables import evidence_table, ledger_table
    evidence_table().groupby(["feature", "provider"]).headroom.min()

pandas comes with `pip install -e ".[parity]"`; no verb needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import evidence
from .checkout import Checkout
from .ledger import as_json

if TYPE_CHECKING:
    import pandas


def evidence_table(folder: Path = evidence.EVIDENCE) -> pandas.DataFrame:
    """A line a row of evidence, nested facts as `run.torch`; `headroom` is that of its tightest
    check."""
    import pandas

    listed: list[dict[str, Any]] = []
    for row in evidence.load(folder):
        flat = {key: value for key, value in row.items() if key not in ("checks", "teeth")}
        found = [check["headroom"] for check in row["checks"].values() if "headroom" in check]
        listed.append({**flat, "headroom": min(found, default=None)})
    table = pandas.json_normalize(listed)
    if len(table):
        table["ts"] = pandas.to_datetime(table["ts"])
    return table


def ledger_table(checkout: Checkout | None = None) -> pandas.DataFrame:
    """A line a feature, as of the newest evidence; `cells.GREEN` and so on count its cells."""
    import pandas

    here = checkout or Checkout()
    rows = [as_json(row) for row in here.statuses(here.as_of())]
    return pandas.json_normalize(rows).set_index("id")
