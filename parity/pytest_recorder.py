# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin that writes what becomes of each test at once, one JSON line a test.

A run that is stopped keeps what it has shown so far. The file is that of VLLMX_TEST_RESULTS.
Under xdist its processes say what they collected, and the one that they report to what came of it.
"""

from __future__ import annotations

import json
import os
from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that others report to tells of outcomes."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes())


def _write(test_id: str, outcome: str, reason: str, seconds: float) -> None:
    fields = {"id": test_id, "outcome": outcome, "reason": reason[:300], "seconds": seconds}
    with open(os.environ["VLLMX_TEST_RESULTS"], "a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def _why(report: Any) -> str:
    """What went wrong, or why it was skipped, in a line."""
    if isinstance(report.longrepr, tuple):  # of a skip: file, line, words
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash is not None else str(report.longrepr)).strip().splitlines()
    return (lines[0] if crash is not None else lines[-1]) if lines else ""


def pytest_collection_finish(session: pytest.Session) -> None:
    """What will be run: a test that tells of nothing more was not reached."""
    for item in session.items:
        _write(item.nodeid, "missing", "not run within the time", 0.0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that can't be imported."""
    if report.failed:
        _write(report.nodeid, "failed", _why(report), 0.0)


class Outcomes:
    """What becomes of tests."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """The call, or whatever went wrong before and after it."""
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.passed else _why(report)
            _write(report.nodeid, report.outcome, reason, report.duration)
