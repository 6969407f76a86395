# SPDX-License-Identifier: Apache-2.0
"""The GPU's part of the evidence: what a job didn't come to is not passed over."""

import subprocess
import sys

import pytest

from parity import evidence, features, gpu_lane
from parity.gpu_lane import gravest, jobs_of
from parity.model_table import MODELS
from parity.op_table import OPS


@pytest.mark.parametrize(
    ("codes", "want"),
    [([0, 0], 0), ([0, 3], 3), ([3, 2, 0], 2), ([0, 2, 1, 3], 1), ([0, -9], 1), ([], 0)],
)
def test_the_gravest_code_is_that_of_all(codes, want) -> None:
    assert gravest(codes) == want


def test_every_op_and_tiny_model_has_a_job() -> None:
    jobs = [" ".join(job) for job in jobs_of(["tests", "models", "ops"])]
    shown = [feature.id for feature in features.load() if "gpu" in feature.needs]
    assert shown and jobs[: len(shown)] == [f"collect --select {name}" for name in shown]
    for entry in OPS.values():
        assert f"replay --select {entry.feature}/" in jobs
    for model in MODELS.values():
        assert (f"replay --select {model.feature}" in jobs) == model.tiny


def main(monkeypatch, folder, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_lane", "--out", str(folder), *arguments])
    return gpu_lane.main()


@pytest.fixture
def clean(monkeypatch):
    facts = {"git": "0" * 40, "dirty": False}
    monkeypatch.setattr(evidence, "run_facts", lambda: facts)
    return facts


def test_jobs_without_evidence_are_no_pass(monkeypatch, tmp_path, clean, capsys) -> None:
    done = subprocess.CompletedProcess([], 0, "nothing", "")
    monkeypatch.setattr(gpu_lane.subprocess, "run", lambda *a, **k: done)
    assert main(monkeypatch, tmp_path, "--only", "models") == 2
    assert "no evidence at all" in capsys.readouterr().out


def test_a_job_that_was_stopped_is_named(monkeypatch, tmp_path, clean, capsys) -> None:
    def run(*a, **k):
        raise subprocess.TimeoutExpired("vllmx", 1)

    monkeypatch.setattr(gpu_lane.subprocess, "run", run)
    assert main(monkeypatch, tmp_path, "--only", "tests") == 2
    assert "unfinished: collect" in capsys.readouterr().out
    assert "stopped for want of time" in (tmp_path / "gpu_lane.log").read_text()


def test_a_changed_tree_is_not_looked_at_unless_asked(monkeypatch, tmp_path, clean, capsys) -> None:
    clean["dirty"] = True
    ran = []
    monkeypatch.setattr(gpu_lane, "run", lambda *a: ran.append(a) or (0, 0.0, ""))
    assert main(monkeypatch, tmp_path) == 2 and not ran
    assert "not that of a commit" in capsys.readouterr().out
    assert main(monkeypatch, tmp_path, "--dirty", "--only", "tests") == 2 and ran
