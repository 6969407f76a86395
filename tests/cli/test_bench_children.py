# SPDX-License-Identifier: Apache-2.0
"""Engines in processes of their own: beside a stand-in for upstream, and started anew."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import COMMON, TINY, save_tiny

from vllmx.cli import main
from vllmx.tasks.bench_child import __file__ as CHILD
from vllmx.tasks.bench_floor import Limits, floor_seconds, work_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "llama"
    save_tiny("llama", path)
    return path


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A package `vllm` whose engine is ours, in processes that are started from here."""
    (tmp_path / "vllm.py").write_text("from vllmx import LLM, SamplingParams\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return sys.executable


INSTANT = """
class SamplingParams:
    def __init__(self, **options):
        pass


class LLM:
    def __init__(self):
        pass

    def generate(self, prompts, params, use_tqdm):
        return []
"""


def test_a_time_is_the_engines_alone_without_the_drawing_of_prompts(tmp_path) -> None:
    (tmp_path / "instant.py").write_text(INSTANT)
    work = {"batch": 64, "input_len": 4096, "output_len": 1, "seed": 1, "vocab": 1000}
    done = subprocess.run(
        [sys.executable, CHILD, "instant", "{}"],
        input=json.dumps(work) + "\n",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    ready, answer = map(json.loads, done.stdout.splitlines())
    assert "first_token_s" in ready["ready"]
    assert answer["tokens"] == [] and answer["seconds"] < 0.01  # a quarter million ids take 0.1


def test_two_engines_answer_the_same_rows_in_turn(folder, upstream, tmp_path, capsys) -> None:
    out = tmp_path / "out.json"
    code = main(
        [
            *("bench", "side-by-side", f"model.model={folder}", "device=cpu", "--dtype", "float32"),
            *(f"bench.upstream_python={upstream}", 'bench.rows=["2x8+4","3x20+1"]'),
            *("bench.num_iters=2", "bench.num_iters_warmup=1", f"bench.output_json={out}"),
            "--max-model-len=128",
        ]
    )
    assert code == 0
    told = json.loads(out.read_text())
    assert [row["row"] for row in told["rows"]] == ["2x8+4", "3x20+1"]
    for row, answers in zip(told["rows"], (4, 6)):
        assert {name: len(times) for name, times in row["seconds"].items()} == {
            "vllmx": 2,
            "upstream in-process": 2,
        }
        assert (
            row["equal_answers"] == {"upstream in-process": answers} and row["answers"] == answers
        )
        assert row["ratio"] == pytest.approx(row["ours"] / row["upstream"], rel=1e-2)
        assert row["repeats"] == 2
    assert set(told["start"]) == {"vllmx", "upstream in-process"}
    assert all(start["ready_s"] > start["engine_s"] > 0 for start in told["start"].values())
    assert "2x8+4: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["bench.rows=[8]"], "'8' is not BATCHxINPUT+OUTPUT"),
        (["bench.upstream_modes=[fast]"], "name some of in-process, multiprocessing"),
        (["model.model=/nowhere"], "model=FOLDER"),
        (["bench.upstream_python=null"], "bench.upstream_python=PATH"),
        (["bench.upstream_python=/nowhere/python"], "there is no such program"),
    ],
)
def test_what_is_wrong_is_named(folder, upstream, wrong, words, capsys) -> None:
    code = main(
        [
            *("bench", "side-by-side", f"model.model={folder}", "device=cpu"),
            *(f"bench.upstream_python={upstream}", *wrong),
        ]
    )
    assert code == 2 and words in capsys.readouterr().err


def test_an_engine_that_does_not_start_tells_why(folder, upstream, tmp_path, capsys) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('no such device')\n")
    code = main(
        [
            *("bench", "side-by-side", f"model.model={folder}", "device=cpu"),
            f"bench.upstream_python={upstream}",
        ]
    )
    assert code == 2 and "no such device" in capsys.readouterr().err


def test_an_engine_that_dies_tells_where(folder, upstream, tmp_path, capsys) -> None:
    (tmp_path / "vllm.py").write_text(
        "import os\nfrom vllmx import LLM as Real, SamplingParams\n"
        "class LLM(Real):\n"
        "    def generate(self, prompts, *args, **kwargs):\n"
        "        if len(prompts) > 1: os._exit(3)\n"
        "        return super().generate(prompts, *args, **kwargs)\n"
    )
    code = main(
        [
            *("bench", "side-by-side", f"model.model={folder}", "device=cpu", "--dtype=float32"),
            *(f"bench.upstream_python={upstream}", 'bench.rows=["2x8+4"]', "--max-model-len=128"),
        ]
    )
    assert code == 2 and "upstream in-process died at" in capsys.readouterr().err


def test_a_start_needs_a_model(capsys) -> None:
    assert main(["bench", "startup"]) == 2
    assert "no model is given" in capsys.readouterr().err


def test_starts_are_timed_from_the_process_to_the_first_token(folder, upstream, capsys) -> None:
    code = main(["bench", "startup", f"model.model={folder}", "device=cpu", "bench.num_iters=1"])
    shown = capsys.readouterr()
    assert code == 0
    told = json.loads(shown.out)
    assert len(told["runs"]) == 2 and told["warm"] == told["runs"][1]
    parts = told["cold"]
    assert parts["all"] == pytest.approx(sum(v for k, v in parts.items() if k != "all"), abs=1e-6)
    assert all(value > 0 for value in parts.values())
    assert "cold caches" in shown.err and "warm caches" in shown.err


def test_the_floor_is_bytes_or_flops_whichever_takes_longer() -> None:
    config = {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
        "vocab_size": 151936,
    }
    work = work_of(config)
    assert work is not None
    head = 2 * 1024 * 151936
    limits = Limits(bandwidth=4.2e12, flops=758e12)
    # The figures of a card: 0.288 ms a step of one request, 24.1 ms for 8 prompts of 2048.
    step = floor_seconds(work, head, limits, 1, 16, 2) - floor_seconds(work, head, limits, 1, 16, 1)
    assert step == pytest.approx(0.288e-3, rel=0.03)
    assert floor_seconds(work, head, limits, 8, 2048, 1) == pytest.approx(24.1e-3, rel=0.1)
    assert work_of({"model_type": "mamba"}) is None


def test_a_seeded_checkpoint_of_any_size_loads(tmp_path) -> None:
    config = {
        **COMMON,
        **TINY["qwen3"],
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_theta": 10000.0,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = tmp_path / "made"
    command = [sys.executable, "-m", "parity.dummy_checkpoint", str(tmp_path), str(made)]
    subprocess.run(command, check=True, cwd=ROOT)
    from checkpoints import build_engine

    from vllmx import SamplingParams

    llm = build_engine(made, dtype="float32")
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, ignore_eos=True)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params, use_tqdm=False)
    answer = output.outputs[0]
    assert len(set(answer.token_ids)) > 3, "logits that do not all point to one token"
