# SPDX-License-Identifier: Apache-2.0
"""Steps scheduled ahead on a GPU end requests where steps one at a time do."""

import pytest
from gpu_engine import answers, engine, greedy, prompts, runner_of

from vllmx import SamplingParams


def kinds(number: int) -> list[SamplingParams]:
    """Parameters of every way to sample and to end."""
    made = []
    for i in range(number):
        common = {"max_tokens": 6 + 5 * i % 30, "detokenize": False}
        made.append(
            [
                SamplingParams(temperature=0, ignore_eos=True, **common),
                SamplingParams(temperature=0.9, seed=i, ignore_eos=True, **common),
                SamplingParams(temperature=0, stop_token_ids=list(range(3, 150)), **common),
                SamplingParams(temperature=0, logprobs=2, ignore_eos=True, **common),
                SamplingParams(temperature=0, repetition_penalty=1.3, ignore_eos=True, **common),
            ][i % 5]
        )
    return made


@pytest.mark.parametrize("blocks", [None, 36], ids=["room", "preemption"])
def test_scheduling_ahead_changes_no_answer(folder, blocks) -> None:
    given = prompts(30, longest=60)
    options = {} if blocks is None else {"num_gpu_blocks_override": blocks}
    want = answers(engine(folder, async_scheduling=False), given, kinds(30))
    llm = engine(folder, async_scheduling=True, **options)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args: preempted.append(args) or preempt(*args)
    assert answers(llm, given, kinds(30)) == want
    assert bool(preempted) == (blocks is not None)
    assert {reason for _, reason in want} == {"length", "stop"}


def test_an_abort_between_steps_leaves_the_others_alone(folder) -> None:
    given = prompts(6, longest=20)
    want = answers(engine(folder, async_scheduling=False), given, greedy(24))
    llm = engine(folder, async_scheduling=True).llm_engine
    for number, prompt in enumerate(given):
        llm.add_request(str(number), prompt, greedy(24))
    done = {}
    for step in range(200):
        for output in llm.step():
            if output.finished:
                done[int(output.request_id)] = list(output.outputs[0].token_ids)
        if step == 5:
            llm.abort_request(["2"])
        if not llm.has_unfinished_requests():
            break
    assert {i: done[i] for i in (0, 1, 3, 4, 5)} == {i: want[i][0] for i in (0, 1, 3, 4, 5)}


def test_sampled_tokens_stay_on_the_device(folder) -> None:
    """The host reads a step's tokens after it has launched the next one."""
    llm = engine(folder, async_scheduling=True)
    steps = runner_of(llm).gpu_steps
    order = []
    execute, sample = steps.execute, steps.sample

    def executed(*args):
        order.append("launch")
        return execute(*args)

    def sampled(*args):
        result = sample(*args)
        get_output = result.get_output

        def read():
            order.append("read")
            return get_output()

        result.get_output = read
        return result

    steps.execute, steps.sample = executed, sampled
    answers(llm, prompts(4, longest=10), greedy(10))
    assert order[:4] == ["launch", "launch", "read", "launch"]
    assert order.count("read") == order.count("launch") == 10
