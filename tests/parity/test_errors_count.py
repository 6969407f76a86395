# SPDX-License-Identifier: Apache-2.0
"""What crashes or is missing in a replay is held against its cell, and is not taken for old."""

import datetime as dt
from pathlib import Path

import pytest

from parity import model_replay, text_replay
from parity.catalogue import Listed
from parity.model_replay import ModelLane
from parity.model_table import expected
from parity.oracle_process import OracleBlocked
from parity.status import Policy, judge
from parity.text_cases import selected
from parity.text_replay import TextLane

ROOT = Path(__file__).parents[2]
NAMES = {"RuntimeError": (RuntimeError, "RED"), "OracleBlocked": (OracleBlocked, "BLOCKED")}


def raising(error):
    def fail(*arguments):
        raise error("no memory")

    return fail


def told(cells, row) -> str:
    """The status of the cell that `row` speaks of."""
    listed = Listed(ROOT)
    (cell,) = [cell for cell in cells(listed) if cell.key == (*key(row),)]
    policy, closure = Policy(sha=listed.policy_sha()), listed.closure(cell)
    now = dt.datetime.fromisoformat(row["ts"])
    return judge(cell, listed.goldens(), [row], closure, policy, dt.timedelta(1), now).status


def key(row):
    return row["feature"], row["case"], row["provider"], row["device"]["name"], row["mode"]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_could_not_be_run(name, monkeypatch):
    error, status = NAMES[name]
    monkeypatch.setattr(model_replay.ModelLane, "_judged", raising(error))
    (cell,) = [c for c in expected("tiny-llama/", "torch") if c.mode == "bs1"]
    (row,) = ModelLane().rows([cell])
    assert told(lambda listed: listed.models("tiny-llama"), row) == status


@pytest.mark.parametrize("name", NAMES)
def test_a_text_that_could_not_be_read(name, monkeypatch):
    error, status = NAMES[name]
    monkeypatch.setattr(text_replay.TextLane, "_judged", raising(error))
    spec = selected("text.block_hash")[0]
    row = TextLane().row(spec)
    assert told(lambda listed: listed.text("block_hash"), row) == status
