# SPDX-License-Identifier: Apache-2.0
"""The pandas tables hold what the evidence and the ledger hold."""

import pytest
from toy_checkout import build

from parity.checkout import Checkout
from parity.tables import evidence_table, ledger_table


@pytest.fixture
def root(tmp_path, monkeypatch):
    """The checkout in small, all green."""
    return build(tmp_path, monkeypatch)


def test_a_line_a_row_and_a_feature(root):
    folder = root / "parity" / "evidence"
    rows = evidence_table(folder)
    assert len(rows) == 4 and set(rows.verdict) == {"pass", "fail"}
    assert rows[rows.feature == "op.toy"].headroom.tolist() == [2.0, 2.0]
    assert (rows["run.machine"] == "toy").all() and rows.ts.dt.year.min() > 2020
    ledger = ledger_table(Checkout(root))
    assert ledger.status.to_dict()["op.toy"] == "GREEN"
    assert ledger.loc["op.toy", "cells.GREEN"] == 2


def test_no_evidence_is_an_empty_table(root, tmp_path):
    assert len(evidence_table(tmp_path / "nothing")) == 0
