# SPDX-License-Identifier: Apache-2.0
"""Steps that fill the token budget as one graph, its kernels in Triton's interpreter."""

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from gpu_helpers import Event, runner_of

from vllmx import SamplingParams
from vllmx.attention.backends import triton_attn
from vllmx.worker import gpu_steps, mixed_graph
from vllmx.worker.input_batch import HostBatch
from vllmx.worker.mixed_graph import MixedGraph

LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 32, "max_model_len": 96}


class Replayed:
    """A graph that runs its step again on what the packets say now."""

    def __init__(self, mixed: MixedGraph) -> None:
        self.mixed, self.replays = mixed, 0

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            self.mixed.hidden_states = self.mixed.step()


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / request.param
    save_tiny(request.param, path)
    return path


@pytest.fixture
def on_a_gpu(monkeypatch, folder):
    """An engine whose full steps are replays; its mixed graph."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    refusal = staticmethod(lambda context: True)
    monkeypatch.setattr(triton_attn.TritonAttentionBackend, "refusal", refusal)
    llm = build_engine(folder, attention_backend="triton", async_scheduling=True, **LIMITS)
    runner = runner_of(llm)
    runner.gpu_steps = steps = gpu_steps.GPUSteps(runner)
    assert steps.mixed_graph is None, "not on a CPU"
    steps.mixed_graph = mixed = MixedGraph(steps, LIMITS["max_num_batched_tokens"])
    mixed.graph = Replayed(mixed)
    return llm, mixed


def prompts(lengths) -> list[dict]:
    rng = np.random.default_rng(5)
    return [{"prompt_token_ids": rng.integers(3, VOCAB, n).tolist()} for n in lengths]


def answers(llm, lengths, params) -> list:
    outputs = llm.generate(prompts(lengths), params, use_tqdm=False)
    return [o.outputs[0].token_ids for o in outputs]


@pytest.mark.parametrize(
    "lengths",
    [
        (64, 32),  # prompts alone, each step exactly full
        (40, 3, 50, 21),  # cut prompts, and decodes beside them
        (30, 2),  # two prompts that fill a step
        (29,),  # nearly full: padding
    ],
)
def test_full_steps_bring_the_tokens_of_others(on_a_gpu, folder, lengths) -> None:
    llm, mixed = on_a_gpu
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True) for _ in lengths]
    want = answers(build_engine(folder, **LIMITS), lengths, params)
    assert answers(llm, lengths, params) == want
    assert mixed.graph.replays


def batch(counts, seq_lens) -> HostBatch:
    counts = np.array(counts)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = np.arange(len(counts))
    lens = np.array(seq_lens, dtype=np.int32)
    return HostBatch([str(i) for i in rows], rows, counts, starts, lens, rows, int(starts[-1]))


def test_what_the_graph_takes(on_a_gpu, monkeypatch) -> None:
    _, mixed = on_a_gpu
    monkeypatch.setattr(mixed_graph, "LONGEST_DECODE", 90)
    assert mixed.takes(batch([32], [32])) and mixed.takes(batch([1, 30], [90, 30]))
    assert mixed.takes(batch([1, 1, 1, 1, 1, 27], [5] * 5 + [27]))
    assert not mixed.takes(batch([28], [28])), "less than nine tenths of the budget"
    assert not mixed.takes(batch([1, 1, 1, 1, 1, 26], [5] * 5 + [26])), "no request for padding"
    assert not mixed.takes(batch([1, 31], [91, 31])), "a decode with too many keys"
    mixed.graph = None
    assert not mixed.takes(batch([32], [32])), "not captured"


def test_tiles_beyond_those_of_a_batch_are_none(on_a_gpu) -> None:
    _, mixed = on_a_gpu
    mixed.send(batch([1, 31], [40, 31]))
    (tiles,) = mixed.tiles.values()
    assert (tiles[tiles[:, 0] >= 0][:, 0] == 1).all(), "decodes have no tile"
    mixed.send(batch([32], [32]))
    assert set(tiles[:, 0].tolist()) == {0, -1}
    assert len(tiles) >= 32 // next(iter(mixed.tiles)) + LIMITS["max_num_seqs"]
