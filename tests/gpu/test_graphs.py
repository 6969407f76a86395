# SPDX-License-Identifier: Apache-2.0
"""A decode step on a GPU is one graph, with sampling in it; it waits for nothing and allocates
nothing."""

import pytest
import torch
from gpu_engine import answers, engine, greedy, prompts, runner_of


def test_graphs_give_the_tokens_of_eager_steps(folder) -> None:
    given = prompts(40)
    params = [greedy(3 + 3 * i % 40) for i in range(len(given))]
    want = answers(engine(folder, enforce_eager=True, async_scheduling=False), given, params)
    assert answers(engine(folder, async_scheduling=False), given, params) == want


def test_every_decode_step_is_one_replay(folder) -> None:
    llm = engine(folder, async_scheduling=False)
    manager = runner_of(llm).gpu_steps.cudagraph_manager
    replayed = []
    replay = manager.run_fullgraph
    manager.run_fullgraph = lambda desc: replayed.append(desc.num_reqs) or replay(desc)
    answers(llm, prompts(9, longest=20), greedy(10))
    # One step of prompts, which has the first tokens; nine of decoding, in the graph for 16.
    assert replayed == [16] * 9


@pytest.mark.parametrize("size", [1, 8, 20])
def test_a_steady_decode_launches_little_beside_its_graph(folder, size) -> None:
    from torch.profiler import ProfilerActivity, profile

    llm = engine(folder)
    given, steps = prompts(size, longest=10), 64
    answers(llm, given, greedy(8))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        answers(llm, given, greedy(steps))
    counts = {e.key: e.count for e in profiler.key_averages()}
    launches = sum(n for key, n in counts.items() if key.startswith("cudaGraphLaunch"))
    assert launches == steps - 1
    # The packet goes there in one copy and the tokens come back in one; both are in the graph or
    # beside it.
    copies = sum(n for key, n in counts.items() if key.startswith("cudaMemcpyAsync"))
    assert copies <= 2 * steps + 40
    kernels = sum(n for key, n in counts.items() if "LaunchKernel" in key)
    assert kernels <= 2 * steps + 600, "the step of the prompts has its own"


def test_a_steady_decode_neither_waits_nor_allocates(folder) -> None:
    llm = engine(folder)
    core = llm.llm_engine.engine_core.engine_core
    for number, prompt in enumerate(prompts(8, longest=10)):
        llm.llm_engine.add_request(str(number), prompt, greedy(200))
    for _ in range(20):
        llm.llm_engine.step()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert core.scheduler.get_request_counts()[0] == 8


def test_graphs_are_captured_when_they_are_first_needed_if_so_configured(folder) -> None:
    lazy = engine(folder, cudagraph_capture="lazy", async_scheduling=False)
    manager = runner_of(lazy).gpu_steps.cudagraph_manager
    assert not manager.graphs
    given = prompts(12, longest=20)  # all in one step, so that twelve decode at once
    got = answers(lazy, given, greedy(12)), answers(lazy, given[:3], greedy(12))
    assert sorted(manager.graphs) == [4, 16]
    eager = engine(folder, async_scheduling=False)
    assert runner_of(eager).gpu_steps.cudagraph_manager.graphs.keys() >= {1, 2, 4, 8, 16, 20}
    assert got == (answers(eager, given, greedy(12)), answers(eager, given[:3], greedy(12)))
