# SPDX-License-Identifier: Apache-2.0
"""Oracles of whole models: several jobs of one process, and what becomes of one that fails."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from oracles import model_job
from oracles.model_job import Answer, Job
from parity import model_golden
from parity.golden import GoldenError

PREPARED: list[int] = []


def compute(job: Job) -> Answer:
    if job.folder == "bad":
        raise ValueError("no such model")
    answer = Answer([[1, 2, os.getpid() % 1000]])
    for _ in range(2):
        answer.add(np.arange(job.top_k), np.zeros(job.top_k), -1.0, 0)
    return answer


def asked(folder: Path, *names: str) -> list[str]:
    files = []
    for i, name in enumerate(names):
        job = {"folder": name, "prompts": [], "forced": [], "max_tokens": 1, "top_k": 4}
        (folder / f"{i}.json").write_text(json.dumps({**job, "sketch_tokens": 1}))
        files += [str(folder / f"{i}.json"), str(folder / f"{i}.safetensors")]
    return files


def run(monkeypatch, files: list[str]) -> int:
    monkeypatch.setattr(sys, "argv", ["oracle", *files])
    told = lambda job: {"lane": job.dtype}  # noqa: E731
    ready = lambda: True  # noqa: E731
    return model_job.main("x", ready, told, compute, lambda: PREPARED.append(os.getpid()))


def test_one_job_is_answered_here(tmp_path: Path, monkeypatch) -> None:
    assert run(monkeypatch, asked(tmp_path, "good")) == 0
    assert load_file(tmp_path / "0.safetensors")["tokens"][2] == os.getpid() % 1000


def test_several_have_processes_of_their_own_and_one_that_fails_says_why(
    tmp_path: Path, monkeypatch
) -> None:
    PREPARED.clear()
    assert run(monkeypatch, asked(tmp_path, "good", "bad", "good")) == 1
    assert [os.getpid()] == PREPARED
    pids = {int(load_file(tmp_path / f"{i}.safetensors")["tokens"][2]) for i in (0, 2)}
    assert len(pids) == 2 and os.getpid() % 1000 not in pids
    assert not (tmp_path / "1.safetensors").exists()
    assert "ValueError: no such model" in (tmp_path / "1.error").read_text()


def test_a_job_that_failed_leaves_the_others_their_answers(monkeypatch) -> None:
    def call(oracle: str, *files: Path, **settings: object) -> None:
        for asked, out in zip(files[::2], files[1::2]):
            try:
                job = Job(**json.loads(asked.read_text()))
                model_job.save_file(compute(job).tensors(job), str(out), {"oracle": "{}"})
            except ValueError:
                out.with_suffix(".error").write_text("ValueError: no such model")
        raise GoldenError("x ended with 1")

    monkeypatch.setattr(model_golden, "call", call)
    job = {"prompts": [], "forced": [], "max_tokens": 1, "top_k": 4, "sketch_tokens": 1}
    good, bad = model_golden.ask_all("x", [{**job, "folder": name} for name in ("good", "bad")])
    assert good[0]["lp.ids"].shape == (2, 4)
    assert isinstance(bad, GoldenError) and "no such model" in str(bad)


@pytest.mark.parametrize("files", [[], ["one"], ["a", "b", "c"]])
def test_jobs_and_outs_come_in_pairs(files: list[str], monkeypatch) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, files)
