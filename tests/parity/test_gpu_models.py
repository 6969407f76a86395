# SPDX-License-Identifier: Apache-2.0
"""Goldens of upstream's models on a GPU, with a stand-in for the oracle, and ours beside them."""

import json

import numpy as np
import pytest
from checkpoints import build_engine
from safetensors.numpy import save_file

from parity import gpu_models, gpu_tokens
from parity.checkpoints import tiny_folder
from parity.golden import GoldenError
from parity.model_table import MODELS
from parity.oracle_process import OracleBlocked

NAME = "tiny-llama"
LENGTHS = (7, 12)


@pytest.fixture
def oracle(monkeypatch):
    """Answers jobs as the oracle would, with noise of its own in the eager lane."""
    rng = np.random.default_rng(0)
    asked = []

    def call(name, job, out, *words):
        job = json.loads(job.read_text())
        asked.append((job, [str(word) for word in words]))
        eager = bool(words)
        sequences = job["forced"] if eager else [rng.integers(3, 99, n).tolist() for n in LENGTHS]
        positions = sum(len(sequence) - 1 for sequence in sequences)
        ids = np.tile(np.arange(10, 20, dtype=np.int32), (positions, 1))
        values = np.tile(-np.arange(1, 11, dtype=np.float32), (positions, 1))
        if eager:  # another order, one id that the graphs did not list
            ids, values = ids[:, ::-1].copy(), values[:, ::-1] + np.float32(0.25)
            ids[:, 0] = 77
        offsets = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
        tensors = {
            "tokens": np.concatenate([np.array(s, np.int32) for s in sequences]),
            "offsets": offsets,
            "lp.ids": ids,
            "lp.val": np.ascontiguousarray(values),
            "lp.next": values[:, 0].copy(),
            "lp.top": ids[:, 0].copy(),
        }
        told = dict.fromkeys(("name", "version", "callable", "torch", "numpy", "device"), "x")
        told |= {"lane": "eager" if eager else "graph", "command": "x", "reps": 1}
        save_file(tensors, str(out), {"oracle": json.dumps(told)})

    monkeypatch.setattr(gpu_models, "call", call)
    return asked


def test_eager_steps_are_asked_what_the_graphs_said(oracle, tmp_path, capsys) -> None:
    assert gpu_models.record(f"model.{NAME}", check=False, folder=tmp_path) == 0
    (first, no_words), (second, words) = oracle
    assert no_words == [] and words == ["--eager"]
    assert first["prompts"] and not second["prompts"]
    assert [len(sequence) for sequence in second["forced"]] == list(LENGTHS)
    lanes = gpu_models.load(NAME, tmp_path)
    graph, eager = (lanes[way].tensors["lp.val"].data for way in ("graph", "eager"))
    difference = eager - graph
    assert np.isnan(difference[:, -1]).all(), "the id that was not listed"
    assert np.allclose(difference[:, :-1], 0.25)
    assert gpu_models.record(NAME, check=True, folder=tmp_path) == 1, "random tokens, other bytes"
    assert "models_gpu/tiny-llama/graph.safetensors: new" in capsys.readouterr().out


def test_without_a_gpu_it_is_blocked(monkeypatch, tmp_path, capsys) -> None:
    def call(*arguments):
        raise OracleBlocked("there is no GPU that torch can see")

    monkeypatch.setattr(gpu_models, "call", call)
    assert gpu_models.record(NAME, check=False, folder=tmp_path) == 3
    assert "no GPU" in capsys.readouterr().out
    assert gpu_models.record("nothing", check=False, folder=tmp_path) == 2


def test_ours_is_measured_by_upstreams_noise(oracle, tmp_path, monkeypatch) -> None:
    gpu_models.record(NAME, check=False, folder=tmp_path)
    monkeypatch.setattr(gpu_models.load, "__defaults__", (tmp_path,))
    llm = build_engine(tiny_folder(MODELS[NAME]), max_logprobs=64)
    told = gpu_tokens.of_golden(llm, NAME)
    positions = sum(LENGTHS) - len(LENGTHS)
    assert told["upstream's eager run"] == {
        "positions": positions * gpu_tokens.LIKELIEST,
        "mean": 0.25,
        "p99": 0.25,
        "max": 0.25,
    }
    assert 0 < told["ours, forced"]["positions"] <= positions * gpu_tokens.LIKELIEST


def test_a_golden_that_was_changed_is_not_read(oracle, tmp_path) -> None:
    gpu_models.record(NAME, check=False, folder=tmp_path)
    path = tmp_path / NAME / "eager.safetensors"
    path.write_bytes((tmp_path / NAME / "graph.safetensors").read_bytes())
    with pytest.raises(GoldenError, match="not the file that the index knows"):
        gpu_models.load(NAME, tmp_path)
