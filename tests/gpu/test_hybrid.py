# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers on a GPU: every answer is worked out in whole numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checkpoints import HYBRID, save_tiny
from gpu_engine import answers, engine, greedy, prompts, runner_of
from hybrid_model import expected, registered, save_hybrid

from vllmx import LLM
from vllmx.worker.model_states import FusedStateCopies

PATTERN = "SSASS"


@pytest.fixture(scope="module")
def whole_numbers(tmp_path_factory):
    """A checkpoint of the model of whole numbers."""
    with registered():
        yield save_hybrid(tmp_path_factory.mktemp("hybrid"), PATTERN)


def hybrid_engine(folder: Any, **options: Any) -> LLM:
    settings = {"load_format": "dummy", "dtype": "float32", "block_size": 4, **options}
    return engine(folder, **settings)


def assert_right(llm: LLM, given: list[dict[str, list[int]]], tokens: int) -> None:
    params = [greedy(1 + (tokens + 5 * i) % 40) for i in range(len(given))]
    for prompt, (got, _) in zip(given, answers(llm, given, params), strict=True):
        assert got == expected(PATTERN, prompt["prompt_token_ids"], len(got))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("mode", ["NONE", "FULL_DECODE_ONLY"])
def test_answers_are_those_of_the_rule(whole_numbers, caching, ahead, mode) -> None:
    llm = hybrid_engine(
        whole_numbers,
        enable_prefix_caching=caching,
        async_scheduling=ahead,
        cudagraph_mode=mode,
        max_num_batched_tokens=64,
    )
    runner = runner_of(llm)
    assert bool(runner.gpu_steps.cudagraph_manager.graphs) == (mode != "NONE")
    assert isinstance(runner.model_state.copies, FusedStateCopies) == caching
    # Prompts of one token are among them, which have no state yet.
    given = [*prompts(24, longest=60), {"prompt_token_ids": [9]}, {"prompt_token_ids": [7]}]
    for _ in range(2):
        assert_right(llm, given, 30)


@pytest.mark.parametrize("caching", [False, True])
def test_a_small_pool_preempts_and_goes_on(whole_numbers, caching) -> None:
    llm = hybrid_engine(
        whole_numbers,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=60,
        max_model_len=128,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda *args: preempted.append(args) or preempt(*args)
    for _ in range(2):
        assert_right(llm, prompts(20, longest=60), 40)
    assert preempted


def test_a_decode_over_block_ends_waits_for_nothing(whole_numbers) -> None:
    llm = hybrid_engine(whole_numbers, enable_prefix_caching=True, max_num_seqs=8)
    for number, prompt in enumerate(prompts(8, longest=10)):
        llm.llm_engine.add_request(str(number), prompt, greedy(200))
    for _ in range(20):
        llm.llm_engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            llm.llm_engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", sorted(HYBRID))
@pytest.mark.parametrize("caching", [False, True])
def test_gated_delta_nets_answer_as_on_a_cpu(name, caching, tmp_path_factory) -> None:
    folder = tmp_path_factory.mktemp("hybrid") / name
    save_tiny(name, folder)
    given = prompts(12, longest=90)
    # Near ties of float32 may fall either way later on: the first tokens are compared.
    want = answers(engine(folder, device="cpu"), given, greedy(4))
    llm = engine(folder, dtype="float32", enable_prefix_caching=caching)
    for _ in range(2):
        got = answers(llm, given, greedy(4))
        assert sum(g == w for g, w in zip(got, want, strict=True)) >= 11
