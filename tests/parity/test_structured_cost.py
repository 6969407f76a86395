# SPDX-License-Identifier: Apache-2.0
"""What the report of structured output's cost says, and which backend's cost fails it."""

import json

import pytest

from parity import structured_cost


def measured(growth):
    times = {"free": [100.0, 110.0], "constrained": [100.0 * (1 + growth), 115.0]}
    return {"step_ms": times, "growth": growth, "growths": [growth, growth]}


class Engine:
    def __init__(self, **settings):
        self.backend = settings["structured_outputs_config"]["backend"]

    def shutdown(self):
        self.backend = None


@pytest.mark.parametrize(
    ("slow", "code"), [("", 0), ("xgrammar", 1), ("guidance", 1), ("lm-format-enforcer", 0)]
)
def test_a_backend_that_auto_takes_must_not_cost_more_than_is_wanted(
    tmp_path, monkeypatch, slow, code
):
    monkeypatch.setattr(structured_cost, "LLM", Engine)
    monkeypatch.setattr(
        structured_cost, "measure", lambda llm, *_: measured(0.2 if llm.backend == slow else 0.1)
    )
    assert structured_cost.main(["--out", str(tmp_path / "cost")]) == code
    found = json.loads((tmp_path / "cost.json").read_text())
    assert list(found["backends"]) == list(structured_cost.BACKENDS)
    text = (tmp_path / "cost.md").read_text()
    for name in structured_cost.BACKENDS:
        assert f"| {name} | {'20.0%' if name == slow else '10.0%'} |" in text
