# SPDX-License-Identifier: Apache-2.0
"""Steps that fill the token budget are one graph, whatever prompts and decodes are in them."""

import pytest
from gpu_engine import answers, engine, greedy, prompts, runner_of

BUDGET = {"max_num_batched_tokens": 1024}


def mixed(number: int) -> list:
    """Prompts longer than the budget together, so that some are cut and others decode meanwhile."""
    return prompts(number, longest=200)


def counted(llm) -> tuple[list, list]:
    """What `llm` replays of its full steps, and of its decode steps, from now on."""
    steps = runner_of(llm).gpu_steps
    full, decode = [], []
    run, replay = steps.mixed_graph.run, steps.cudagraph_manager.run_fullgraph
    steps.mixed_graph.run = lambda tokens: full.append(tokens) or run(tokens)
    steps.cudagraph_manager.run_fullgraph = lambda desc: decode.append(desc) or replay(desc)
    return full, decode


@pytest.mark.parametrize("capture", ["eager", "lazy"])
@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "ahead"])
def test_full_steps_give_the_tokens_of_steps_without_a_graph(folder, capture, is_async) -> None:
    given = mixed(30)
    params = [greedy(2 + 5 * i % 40) for i in range(len(given))]
    plain = engine(folder, enforce_eager=True, async_scheduling=False, **BUDGET)
    want = answers(plain, given, params)
    llm = engine(folder, async_scheduling=is_async, cudagraph_capture=capture, **BUDGET)
    full, decode = counted(llm)
    assert answers(llm, given, params) == want
    assert full and decode, "both kinds of graph had steps"
    assert all(921 < tokens <= 1024 for tokens in full), "no step ran on padding for the most part"


def test_full_steps_with_several_decodes_and_sampled_requests(folder) -> None:
    from vllmx import SamplingParams

    given = mixed(24)
    params = [
        greedy(40)
        if i % 2
        else SamplingParams(temperature=0.8, seed=i, max_tokens=12, ignore_eos=True, top_p=0.9)
        for i in range(len(given))
    ]
    want = answers(engine(folder, enforce_eager=True, **BUDGET), given, params)
    llm = engine(folder, **BUDGET)
    full, _ = counted(llm)
    assert answers(llm, given, params) == want
    assert full
