# SPDX-License-Identifier: Apache-2.0
"""Steps that fill the token budget as one graph, its kernels in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import VOCAB, build_engine, save_tiny
from gpu_helpers import Event, runner_of

from vllmx import SamplingParams
from vllmx.attention.selector import all_backends
from vllmx.ir.ops.attention import paged_attention
from vllmx.worker import gpu_steps, mixed_graph
from vllmx.worker.input_batch import HostBatch
from vllmx.worker.mixed_graph import MixedGraph, MixedGraphs, most_tokens

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
    """An engine whose steps with prompts are replays; its graphs."""
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    all_backends()  # registers them
    impl = replace(paged_attention.impls["triton"], supports=None)
    monkeypatch.setitem(paged_attention.impls, "triton", impl)
    llm = build_engine(folder, attention_backend="triton", async_scheduling=True, **LIMITS)
    runner = runner_of(llm)
    runner.gpu_steps = steps = gpu_steps.GPUSteps(runner)
    assert steps.mixed_graphs is None, "not on a CPU"
    steps.mixed_graphs = graphs = MixedGraphs(steps, [4, 12, LIMITS["max_num_batched_tokens"]])
    for graph in graphs.graphs.values():
        graph.graph = Replayed(graph)
    return llm, graphs


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
    llm, graphs = on_a_gpu
    params = [SamplingParams(temperature=0, max_tokens=4, ignore_eos=True) for _ in lengths]
    want = answers(build_engine(folder, **LIMITS), lengths, params)
    assert answers(llm, lengths, params) == want
    assert graphs.whole.graph.replays


def batch(counts, seq_lens) -> HostBatch:
    counts = np.array(counts)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    rows = np.arange(len(counts))
    lens = np.array(seq_lens, dtype=np.int32)
    return HostBatch([str(i) for i in rows], rows, counts, starts, lens, rows, int(starts[-1]))


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ((4,), [4]),  # exactly
        ((3,), [4]),
        ((5, 4), [12]),
        ((13, 9), []),  # more than the second, and not nearly the budget
        ((32, 9), [32, 12]),  # the second prompt beside a decode
    ],
)
def test_smaller_steps_bring_the_tokens_of_others(on_a_gpu, folder, lengths, sizes) -> None:
    llm, graphs = on_a_gpu
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    want = answers(build_engine(folder, **LIMITS), lengths, params)
    assert answers(llm, lengths, params) == want
    replays = {size: graph.graph.replays for size, graph in graphs.graphs.items()}
    replays[4] -= 1  # the last step, which decodes alone
    assert [size for size, count in replays.items() if count] == sorted(sizes)


def test_what_the_graphs_take(on_a_gpu, monkeypatch) -> None:
    _, graphs = on_a_gpu
    monkeypatch.setattr(mixed_graph, "LONGEST_DECODE", 90)

    def size(counts, seq_lens) -> int | None:
        found = graphs.find(batch(counts, seq_lens))
        return found and found.num_tokens

    assert size([32], [32]) == size([1, 30], [90, 30]) == 32
    assert size([1, 1, 1, 1, 1, 27], [5] * 5 + [27]) == 32
    assert size([28], [28]) is None, "less than nine tenths of the budget"
    assert size([12], [12]) == size([5], [5]) == size([1, 4], [90, 4]) == 12
    assert size([4], [4]) == size([2], [60]) == 4
    assert size([1, 1, 1, 1, 1, 26], [5] * 5 + [26]) is None, "no request for padding"
    assert size([1, 1, 1, 1, 1, 6], [5] * 5 + [6]) is None
    assert size([1, 31], [91, 31]) is None, "a decode with too many keys"
    graphs.whole.graph = None
    assert size([32], [32]) is None, "not captured at the start"


def test_a_smaller_graph_is_captured_when_a_batch_comes_that_it_holds(
    on_a_gpu, monkeypatch
) -> None:
    _, graphs = on_a_gpu
    small, asked = graphs.graphs[4], []
    small.graph = None

    def capture(pool, stream) -> None:
        asked.append(small.num_tokens)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB")
        small.graph = Replayed(small)

    monkeypatch.setattr(small, "capture", capture)
    monkeypatch.setattr(graphs.steps.cudagraph_manager, "pool_and_stream", lambda: (None, None))
    assert graphs.find(batch([5], [5])).num_tokens == 12 and not asked
    assert graphs.find(batch([3], [3])) is None
    assert graphs.find(batch([3], [3])) is None and asked == [4], "without memory once, so for good"
    small.without = False
    assert graphs.find(batch([3], [3])) is small and asked == [4, 4]


def test_steps_that_keep_the_device_longer_than_the_host_have_no_smaller_graph(on_a_gpu) -> None:
    llm, _ = on_a_gpu
    model = runner_of(llm).model
    few, many = (most_tokens(model, 4, processors) for processors in (1, 132))
    assert many == pytest.approx(132 * few, rel=1e-3)
    assert most_tokens(model, 8, 1) == pytest.approx(2 * few, rel=1e-3)


def test_tiles_beyond_those_of_a_batch_are_none(on_a_gpu) -> None:
    mixed = on_a_gpu[1].whole
    mixed.send(batch([1, 31], [40, 31]))
    (tiles,) = mixed.tiles.values()
    assert (tiles[tiles[:, 0] >= 0][:, 0] == 1).all(), "decodes have no tile"
    mixed.send(batch([32], [32]))
    assert set(tiles[:, 0].tolist()) == {0, -1}
    assert len(tiles) >= 32 // next(iter(mixed.tiles)) + LIMITS["max_num_seqs"]
