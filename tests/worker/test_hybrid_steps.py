# SPDX-License-Identifier: Apache-2.0
"""A GPU's steps of models with recurrent layers, with its kernels in Triton's interpreter."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from gpu_helpers import on_a_gpu, runner_of
from hybrid_model import VOCAB, Recurrence, expected, hybrid_engine, registered, save_hybrid

from vllmx import LLM, SamplingParams
from vllmx.ir.select import OpChoice
from vllmx.kernels.triton_input import prepare_states
from vllmx.layers.mamba_base import mamba_layers
from vllmx.worker.gpu_steps import graph_refusal
from vllmx.worker.model_states import FusedStateCopies, StateCopies
from vllmx.worker.profile_run import profile_run

PATTERN = "SSASS"
SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "block_size": 4,
    "num_gpu_blocks_override": 120,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 80,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with registered():
        yield save_hybrid(tmp_path_factory.mktemp("hybrid"), PATTERN)


def ask(llm: LLM, lengths: tuple[int, ...], seed: int = 0, max_tokens: int = 12) -> list[Any]:
    # Prompts of one token have no state yet and are decoded from the start.
    asked = [np.random.default_rng((seed, n)).integers(3, VOCAB, n).tolist() for n in lengths]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)
    for prompt, output in zip(asked, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        assert got == expected(PATTERN, prompt, len(got)), len(prompt)
    return outputs


def poison(llm: LLM) -> None:
    for layer in mamba_layers(runner_of(llm).model).values():
        for state in layer.kv_cache:
            state[1:].fill_(float("nan"))


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_graphs_of_decodes_carry_the_states(monkeypatch, folder, caching, async_scheduling) -> None:
    llm = on_a_gpu(
        monkeypatch,
        folder,
        [1, 2, 4],
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        **SETTINGS,
    )
    runner = runner_of(llm)
    if caching:
        runner.model_state.copies = FusedStateCopies(runner.model_state.copies.pages)
    poison(llm)
    lengths = (1, 30, 5, 17, 1, 2, 1)
    for seed in range(2):
        ask(llm, lengths, seed)
    for few in ((3,), (3, 4)):
        ask(llm, few, 2)
    graphs = runner.gpu_steps.cudagraph_manager.graphs
    assert all(graph.replays for graph in graphs.values()), "every graph was used"
    again = ask(llm, (30, 17), 1)
    assert [bool(output.num_cached_tokens) for output in again] == [caching, caching]


def test_padding_writes_to_the_null_block_alone(monkeypatch, folder) -> None:
    llm = on_a_gpu(monkeypatch, folder, [4], **SETTINGS)
    runner = runner_of(llm)
    ask(llm, (9, 9, 9, 9))  # rows and tables of all four are in place
    layers = list(mamba_layers(runner.model).values())
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, params)
    engine.step()
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    (request_id,) = scheduler.requests
    tables = scheduler.kv_cache_manager.get_block_ids(request_id)
    mine = {block for table in tables for block in table}
    for layer in layers:
        layer.kv_cache[1].fill_(3)
    replays = runner.gpu_steps.cudagraph_manager.graphs[4].replays
    engine.step()
    assert runner.gpu_steps.cudagraph_manager.graphs[4].replays == replays + 1
    for layer in layers:
        changed = (layer.kv_cache[1] != 3).flatten(1).any(1).nonzero().flatten().tolist()
        assert set(changed) <= mine | {0}
    buffers = runner.gpu_steps.buffers
    for _, _, blocks in buffers._states:
        assert blocks[1:4].flatten().tolist() == [0, 0, 0]
    assert buffers.has_initial_state[:4].tolist() == [True, False, False, False]


def test_states_lie_in_the_block_of_the_last_token() -> None:
    table = torch.tensor([[11, 12, 13], [21, 22, 23], [31, 32, 33]], dtype=torch.int32)
    rows = torch.tensor([2, 0, 1, 0], dtype=torch.int32)
    lengths = torch.tensor([4, 5, 12, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 6, 8, 9], dtype=torch.int32)
    blocks, has_state = torch.full((4, 1), -1, dtype=torch.int32), torch.ones(4, dtype=torch.bool)
    prepare_states(rows, starts, lengths, table, 4, blocks, has_state)
    assert blocks.flatten().tolist() == [31, 12, 23, 0]
    assert has_state.tolist() == [True, False, True, False]


@pytest.mark.parametrize("width", [4, 12, 8196])
def test_states_are_copied_in_every_layer_of_their_group_alone(width) -> None:
    generator = torch.Generator().manual_seed(0)
    stride = width + 20
    whole = [
        torch.randint(0, 256, (7, stride), dtype=torch.uint8, generator=generator) for _ in "abc"
    ]
    # The first two allocations are shared by both groups, as a model's are.
    pages = [[w[:, :width] for w in whole[:2]], [w[:, :width] for w in whole]]
    blocks = np.array([[[1, 3], [2, 4]], [[6, 6], [5, 0]]], dtype=np.int32)
    want = [w.clone() for w in whole]
    for i, w in enumerate(want):
        if i < 2:
            w[2, :width], w[4, :width] = whole[i][1, :width], whole[i][3, :width]
        w[5, :width], w[0, :width] = whole[i][6, :width], whole[i][6, :width]
    before = [w.clone() for w in whole]
    StateCopies(pages)(blocks)
    assert all(torch.equal(*pair) for pair in zip(whole, want, strict=True))
    for w, old in zip(whole, before, strict=True):
        w.copy_(old)
    FusedStateCopies(pages)(blocks)
    assert all(torch.equal(*pair) for pair in zip(whole, want, strict=True))


def test_layers_whose_states_the_host_must_know_have_no_graphs(monkeypatch, folder) -> None:
    llm = on_a_gpu(monkeypatch, folder, [], **SETTINGS)
    runner = runner_of(llm)
    for layer in runner.attn_layers:
        monkeypatch.setattr(layer.backend, "supports_cudagraph", classmethod(lambda cls: True))
    runner.ops.choices.pop("reshape_and_cache", None)
    assert graph_refusal(runner) is None
    monkeypatch.setattr(Recurrence, "graphs", False)
    assert graph_refusal(runner) == "layer layers.0 asks the device for its states"


def test_experts_by_their_definition_have_no_graphs(monkeypatch, folder) -> None:
    llm = on_a_gpu(monkeypatch, folder, [], **SETTINGS)
    runner = runner_of(llm)
    for layer in runner.attn_layers:
        monkeypatch.setattr(layer.backend, "supports_cudagraph", classmethod(lambda cls: True))
    runner.ops.choices.pop("reshape_and_cache", None)
    runner.ops.choices["fused_experts"] = OpChoice("fused_experts", "triton")
    assert graph_refusal(runner) is None
    runner.ops.choices["fused_experts"] = OpChoice("fused_experts", "torch")
    assert graph_refusal(runner) == (
        "op fused_experts: provider torch asks the device for the experts of each token"
    )


@pytest.mark.parametrize("caching", [False, True])
def test_nothing_is_left_of_the_profile_run(folder, caching) -> None:
    llm = hybrid_engine(folder, enable_prefix_caching=caching, max_num_batched_tokens=60)
    runner = runner_of(llm)
    assert profile_run(runner) == 60
    layers = mamba_layers(runner.model).values()
    caches = [weakref.ref(layer.kv_cache[0].untyped_storage()) for layer in layers]
    runner.release_kv_cache()
    gc.collect()
    assert all(cache() is None for cache in caches)
    runner.initialize_kv_cache(llm.llm_engine.engine_core.engine_core.kv_cache_config)
    ask(llm, (9, 30, 1))
