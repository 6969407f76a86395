# SPDX-License-Identifier: Apache-2.0
"""Goldens of upstream's models on a GPU, with a stand-in for the oracle, and ours beside them."""

import json

import numpy as np
import pytest
from checkpoints import build_engine
from safetensors.numpy import save_file

from parity import gpu_models, gpu_tokens, oracle_process
from parity.checkpoints import tiny_folder
from parity.golden import GoldenError
from parity.model_table import MODELS
from parity.oracle_process import OracleBlocked, search_path

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
    assert gpu_models.record(f"model.{NAME}/", check=False, folder=tmp_path) == 0
    (first, no_words), (second, words) = oracle
    assert no_words == [] and words == ["--eager"]
    assert first["prompts"] and not second["prompts"]
    assert [len(sequence) for sequence in second["forced"]] == list(LENGTHS)
    assert first["top_k"] == second["top_k"] == gpu_models.TOP_K
    lanes = gpu_models.load(NAME, tmp_path)
    graph, eager = (lanes[way].tensors["lp.val"].data for way in ("graph", "eager"))
    difference = eager - graph
    assert np.isnan(difference[:, -1]).all(), "the id that was not listed"
    assert np.allclose(difference[:, :-1], 0.25)
    assert gpu_models.record(NAME, check=True, folder=tmp_path) == 1, "random tokens, other bytes"
    assert "models_gpu/tiny-llama/graph.safetensors: new" in capsys.readouterr().out


def test_what_one_model_says_does_not_keep_others_from_being_asked(
    oracle, tmp_path, monkeypatch, capsys
) -> None:
    def ask(entry, really=gpu_models.ask_both):
        if entry.name == "tiny-llama":
            raise GoldenError("vllm_gpu_model ended with 1: out of memory")
        return really(entry)

    monkeypatch.setattr(gpu_models, "ask_both", ask)
    assert gpu_models.record("tiny-llama,tiny-qwen3_moe", check=False, folder=tmp_path) == 2
    assert "tiny-llama: vllm_gpu_model ended with 1: out of memory" in capsys.readouterr().out
    assert gpu_models.load("tiny-qwen3_moe", tmp_path).keys() == {"graph", "eager"}


def test_without_a_gpu_it_is_blocked(monkeypatch, tmp_path, capsys) -> None:
    def call(*arguments):
        raise OracleBlocked("there is no GPU that torch can see")

    monkeypatch.setattr(gpu_models, "call", call)
    assert gpu_models.record(NAME, check=False, folder=tmp_path) == 3
    assert "no GPU" in capsys.readouterr().out
    assert gpu_models.record("nothing", check=False, folder=tmp_path) == 2
    assert "tiny-qwen3" in capsys.readouterr().out, "what could have been said"


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
    assert any(fault.startswith("mean ") for fault in told["faults"]), "the stand-in made them up"


def test_a_verdict_is_upstreams_noise_and_no_token_of_the_lists_is_lost() -> None:
    noise = {"positions": 600, "mean": 0.05, "p99": 0.2}

    def faults(mean: float, p99: float, positions: int = 600) -> list[str]:
        ours = {"positions": positions, "mean": mean, "p99": p99}
        return gpu_tokens.faults(ours, noise, 600)

    assert faults(0.07, 0.39) == []
    assert faults(0.08, 0.39) == ["mean 0.08, 0.075 allowed"]
    assert faults(0.07, 0.41) == ["p99 0.41, 0.4 allowed"]
    assert faults(0.07, 0.39, 590) == ["10 of 600 tokens are not in our lists"]
    assert faults(float("nan"), 0.1), "what is no number is no pass"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "give --golden, or --model, --lanes and --prompts"),
        (["--golden", "tiny-lama"], "no model is called tiny-lama; they are smollm2-135m,"),
    ],
)
def test_what_is_to_be_measured_must_be_said(words, told, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["gpu_tokens", "--out", "x.json", *words])
    with pytest.raises(SystemExit) as ended:
        gpu_tokens.main()
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


def test_oracles_of_our_own_environment_are_given_what_we_were(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/dependencies")
    assert search_path("hf_model") == f"{oracle_process.ROOT}:/dependencies"
    assert search_path("vllm_gpu_model") == str(oracle_process.ROOT), "upstream shares nothing"
    monkeypatch.delenv("PYTHONPATH")
    assert search_path("hf_model") == str(oracle_process.ROOT)


def test_a_golden_that_was_changed_is_not_read(oracle, tmp_path) -> None:
    gpu_models.record(NAME, check=False, folder=tmp_path)
    path = tmp_path / NAME / "eager.safetensors"
    path.write_bytes((tmp_path / NAME / "graph.safetensors").read_bytes())
    with pytest.raises(GoldenError, match="not the file that the index knows"):
        gpu_models.load(NAME, tmp_path)
