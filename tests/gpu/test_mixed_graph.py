# SPDX-License-Identifier: Apache-2.0
"""Steps with prompts in them are graphs of a few sizes, whatever prompts and decodes they have."""

import pytest
from gpu_engine import answers, engine, greedy, prompts, runner_of

BUDGET = {"max_num_batched_tokens": 1024}


def mixed(number: int) -> list:
    """Prompts longer than the budget together, so that some are cut and others decode meanwhile."""
    return prompts(number, longest=200)


def counted(llm) -> tuple[dict[int, list[int]], list]:
    """What `llm` replays of its steps with prompts, tokens by size of the graph, and of its decode
    steps, from now on."""
    steps = runner_of(llm).gpu_steps
    tokens, decode = {}, []
    for graph in steps.mixed_graphs.graphs.values():
        watched(graph, tokens.setdefault(graph.num_tokens, []))
    replay = steps.cudagraph_manager.run_fullgraph
    steps.cudagraph_manager.run_fullgraph = lambda desc: decode.append(desc) or replay(desc)
    return tokens, decode


def watched(graph, seen: list[int]) -> None:
    run = graph.run
    graph.run = lambda tokens: seen.append(tokens) or run(tokens)


@pytest.mark.parametrize("capture", ["eager", "lazy"])
@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "ahead"])
def test_steps_with_prompts_give_the_tokens_of_steps_without_a_graph(
    folder, capture, is_async
) -> None:
    given = mixed(30)
    params = [greedy(2 + 5 * i % 40) for i in range(len(given))]
    plain = engine(folder, enforce_eager=True, async_scheduling=False, **BUDGET)
    want = answers(plain, given, params)
    llm = engine(folder, async_scheduling=is_async, cudagraph_capture=capture, **BUDGET)
    tokens, decode = counted(llm)
    assert answers(llm, given, params) == want
    assert tokens[1024] and decode, "both kinds of graph had steps"
    assert all(921 < n <= 1024 for n in tokens[1024]), "no step ran on padding for the most part"
    assert all(n <= size for size, seen in tokens.items() for n in seen)


def test_every_size_gives_the_tokens_of_steps_without_a_graph(folder) -> None:
    plain = engine(folder, enforce_eager=True, async_scheduling=False, **BUDGET)
    llm = engine(folder, **BUDGET)
    tokens, _ = counted(llm)
    assert list(tokens)[:3] == [64, 128, 256] and list(tokens)[-1] == 1024
    for number in (1, 2, 3, 4, 5, 6, 8):
        given = mixed(number)
        want = answers(plain, given, [greedy(6)] * number)
        assert answers(llm, given, [greedy(6)] * number) == want
    assert sum(bool(seen) for seen in tokens.values()) >= 4, tokens


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
    tokens, _ = counted(llm)
    assert answers(llm, given, params) == want
    assert tokens[1024]
