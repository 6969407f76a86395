# SPDX-License-Identifier: Apache-2.0
"""Reasoning is ended when its budget is used up, and only then."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllmx.config import ReasoningConfig, StructuredOutputsConfig, VllmConfig
from vllmx.engine.front import set_reasoning_markers
from vllmx.exceptions import UserError
from vllmx.sample.sampler import Sampler
from vllmx.sampling_params import SamplingParams
from vllmx.worker.states import RequestState

START, END, WORD, ANSWER = [20, 21], [22, 23, 24], 5, 6
VOCAB = 32


def make(prompt: list[int], budget: int | None, output: list[int] = [], start=START, end=END):  # noqa: B006
    states = RequestState(4, 64, VOCAB, "cpu")
    config = ReasoningConfig(reasoning_start_str="s", reasoning_end_str="e")
    config.initialize_token_ids(start, end)
    sampler = Sampler(states, "raw_logprobs", 0, reasoning_config=config)
    row = states.add_request("r", len(prompt), prompt + output, 0)
    sampler.add_request(
        row, len(prompt), SamplingParams(temperature=0.0, thinking_token_budget=budget)
    )
    return states, sampler, row


def run(made, wants: list[int]) -> list[int]:
    """Tokens of a model that wants these; what is forced takes their place."""
    states, sampler, row = made
    got = []
    for want in wants:
        logits = torch.zeros(1, VOCAB)
        logits[0, want] = 9.0
        position = np.array([states.total_len[row] - 1])
        token = int(sampler(logits, np.array([row]), position).sampled_token_ids[0])
        states.all_token_ids.np[row, states.total_len[row]] = token
        states.total_len[row] += 1
        got.append(token)
    return got


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_reasoning_that_is_generated_ends_after_its_budget(budget: int) -> None:
    got = run(make([1], budget), [*START, *[WORD] * 8])
    assert got == [*START, *[WORD] * budget, *END, *[WORD] * (8 - budget - 3)]


@pytest.mark.parametrize(("inside", "left"), [(0, 2), (1, 1), (2, 0), (9, 0)])
def test_tokens_of_reasoning_within_the_prompt_count(inside: int, left: int) -> None:
    got = run(make([*START, *END, 1, *START, *[WORD] * inside], 2), [WORD] * 8)
    assert got == [*[WORD] * left, *END, *[WORD] * (5 - left)]


@pytest.mark.parametrize("prompt", [[1], [*START, 1, *END], [START[1], START[0]]])
def test_what_is_no_reasoning_has_no_budget(prompt: list[int]) -> None:
    assert run(make(prompt, 0), [WORD] * 6) == [WORD] * 6


def test_reasoning_that_ends_by_itself_is_left_alone_and_the_next_has_the_budget_again() -> None:
    wants = [*START, WORD, *END, ANSWER, *START, WORD, WORD, *END, ANSWER]
    assert run(make([1], 5), wants) == wants


def test_no_reasoning_is_begun_again_after_one_that_was_ended() -> None:
    wants = [*START, WORD, WORD, WORD, WORD, ANSWER, *START, WORD, WORD, WORD, ANSWER]
    got = run(make([1], 1), wants)
    assert got == [*START, WORD, *END, ANSWER, *START, *END, ANSWER]


def test_without_a_budget_reasoning_goes_on() -> None:
    assert run(make(START, None), [WORD] * 9) == [WORD] * 9


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_request_goes_on_where_it_was_preempted(cut: int) -> None:
    wants = [*START, *[WORD] * 6, ANSWER, *START, WORD, WORD, WORD, WORD]
    whole = run(make([1], 2), wants)
    first = run(make([1], 2), wants[:cut])
    assert first + run(make([1], 2, output=first), wants[cut:]) == whole


def test_rows_keep_apart_whatever_their_order() -> None:
    states, sampler, first = make(START, 1)
    second = states.add_request("q", 2, START, 0)
    sampler.add_request(second, 2, SamplingParams(temperature=0.0, thinking_token_budget=2))
    third = states.add_request("p", 2, START, 0)
    sampler.add_request(third, 2, SamplingParams(temperature=0.0))
    logits = torch.zeros(3, VOCAB)
    logits[:, WORD] = 9.0
    seen = {first: [], second: [], third: []}
    for rows in ([first, second, third], [third, first, second], [second, third, first]):
        out = sampler(logits, np.array(rows), np.full(3, 1)).sampled_token_ids.tolist()
        for row, token in zip(rows, out, strict=True):
            seen[row].append(token)
    assert seen[first] == [WORD, *END[:2]]
    assert seen[second] == [WORD, WORD, END[0]]
    assert seen[third] == [WORD] * 3


def test_a_marker_without_tokens_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="reasoning_end_str='e'"):
        ReasoningConfig("s", "e").initialize_token_ids([1], [])


def test_markers_come_from_the_config_or_else_from_the_reasoning_parser() -> None:
    class Letters:
        backend = SimpleNamespace(token_to_id={"<think>": 1, "</think>": 2}.get)

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [len(text)]

    config = VllmConfig(structured_outputs_config=StructuredOutputsConfig())
    set_reasoning_markers(config, Letters())
    assert config.reasoning_config is None
    config.structured_outputs_config.reasoning_parser = "qwen3"
    set_reasoning_markers(config, Letters())
    assert config.reasoning_config.reasoning_start_str == "<think>"
    assert config.reasoning_config.reasoning_end_token_ids == [8]
    config.reasoning_config = ReasoningConfig("[", "]]")
    set_reasoning_markers(config, Letters())
    assert config.reasoning_config.reasoning_end_token_ids == [2]
