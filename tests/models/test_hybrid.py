# SPDX-License-Identifier: Apache-2.0
"""Models with recurrent layers through the engine: every answer is worked out in whole numbers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hybrid_model import VOCAB, expected, hybrid_engine, registered, save_hybrid

from vllmx import LLM, SamplingParams
from vllmx.layers.mamba_base import mamba_layers

PATTERNS = ["SA", "SSSA", "SSASAS"]
"""One group of states; several in one allocation; several layers a group."""


@pytest.fixture(scope="module", autouse=True)
def known():
    with registered():
        yield


@pytest.fixture(scope="module", params=PATTERNS)
def pattern(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(pattern: str, tmp_path_factory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), pattern)


def core_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core


def runner_of(llm: LLM) -> Any:
    return core_of(llm).model_executor.driver_worker.model_runner


def prompts(seed: int, lengths: tuple[int, ...] = (1, 3, 8, 17, 40)) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


def run(llm: LLM, asked: list[list[int]], max_tokens: int = 12) -> list[Any]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": p} for p in asked], params, use_tqdm=False)


def assert_right(outputs: list[Any], pattern: str) -> None:
    for output in outputs:
        got = list(output.outputs[0].token_ids)
        assert got == expected(pattern, list(output.prompt_token_ids), len(got))


def poison(llm: LLM) -> None:
    """Let every block but the null block hold what it may hold after its last user."""
    runner = runner_of(llm)
    for layer in mamba_layers(runner.model).values():
        for state in layer.kv_cache:
            state[1:].fill_(float("nan"))


@pytest.mark.parametrize("backend", ["native", "sdpa", "torch"])
def test_one_by_one_and_together(folder, pattern, backend) -> None:
    llm = hybrid_engine(folder, attention_backend=backend)
    poison(llm)
    for prompt in prompts(0):
        assert_right(run(llm, [prompt]), pattern)
    assert_right(run(llm, prompts(1)), pattern)


@pytest.mark.parametrize("budget", [4, 5, 33])
def test_prompts_in_pieces(folder, pattern, budget) -> None:
    llm = hybrid_engine(folder, max_num_batched_tokens=budget, max_num_seqs=4)
    poison(llm)
    assert_right(run(llm, prompts(2)), pattern)


def test_preempted_requests_begin_anew(folder, pattern, monkeypatch) -> None:
    groups = 2 if pattern == "SA" else 4
    llm = hybrid_engine(
        folder, num_gpu_blocks_override=12 + 3 * groups, max_model_len=96, max_num_seqs=5
    )
    poison(llm)
    scheduler = core_of(llm).scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args: preempted.append(args) or preempt(*args)
    )
    assert_right(run(llm, prompts(3, (30, 25, 40, 21, 33)), 50), pattern)
    assert preempted


def test_blocks_of_aborted_requests_are_used_again(folder, pattern) -> None:
    llm = hybrid_engine(folder, num_gpu_blocks_override=24, max_model_len=64, max_num_seqs=2)
    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for i, prompt in enumerate(prompts(4, (20, 9, 33))):
        engine.add_request(f"gone{i}", {"prompt_token_ids": prompt}, params)
    for _ in range(4):
        engine.step()
    engine.abort_request([f"gone{i}" for i in range(3)])
    while engine.has_unfinished_requests():
        engine.step()
    assert_right(run(llm, prompts(5)), pattern)


# ---------------------------------------------------------------- prefix caching


def aligned(folder: Path, **settings: Any) -> LLM:
    return hybrid_engine(folder, enable_prefix_caching=True, **settings)


def test_a_prefix_hit_goes_on_from_the_cached_state(folder, pattern) -> None:
    llm = aligned(folder)
    config = llm.llm_engine.vllm_config.cache_config
    assert (config.mamba_cache_mode, config.block_size) == ("align", 8)
    shared = prompts(6, (29,))[0]
    asked = [shared + more for more in prompts(7, (1, 9, 20))]
    first = run(llm, asked[:1])
    assert first[0].num_cached_tokens == 0
    # The states of the first prompt that are kept are those at 24, its last whole block.
    rest = run(llm, asked[1:])
    assert [output.num_cached_tokens for output in rest] == [24, 24]
    # Now the ends of those prompts are kept, and what was decoded at block ends.
    again = run(llm, asked[1:])
    assert [output.num_cached_tokens for output in again] == [32, 48]
    assert_right(first + rest + again, pattern)


def test_a_hit_leaves_the_cached_state_as_it_was(folder, pattern) -> None:
    llm = aligned(folder)
    asked = prompts(8, (16,))[0]
    longer = [asked + more for more in prompts(9, (3, 5, 30))]
    run(llm, [[*asked, 7]])
    for _ in range(2):
        outputs = run(llm, longer)
        assert all(output.num_cached_tokens >= 16 for output in outputs)
        assert_right(outputs, pattern)


def test_answers_go_on_over_block_ends_and_are_hit(folder, pattern) -> None:
    llm = aligned(folder, max_num_batched_tokens=16, max_num_seqs=8)
    poison(llm)
    outputs = run(llm, prompts(10), 45)
    assert_right(outputs, pattern)
    talk = [[*o.prompt_token_ids, *o.outputs[0].token_ids, 5] for o in outputs]
    replies = run(llm, talk, 9)
    # Of each answer the last token was never computed.
    hits = [(len(prompt) - 2) // 8 * 8 for prompt in talk]
    assert [reply.num_cached_tokens for reply in replies] == hits
    assert_right(replies, pattern)


def test_a_small_pool_evicts_and_preempts(folder, pattern, monkeypatch) -> None:
    groups = 2 if pattern == "SA" else 4
    llm = aligned(
        folder,
        num_gpu_blocks_override=14 + 5 * groups,
        max_model_len=96,
        max_num_seqs=5,
        max_num_batched_tokens=24,
    )
    poison(llm)
    scheduler = core_of(llm).scheduler
    preempted = []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args: preempted.append(args) or preempt(*args)
    )
    shared = prompts(11, (17,))[0]
    asked = [shared + more for more in prompts(12, (13, 9, 25, 4, 17))]
    for _ in range(2):
        assert_right(run(llm, asked, 50), pattern)
    assert preempted
    assert llm.reset_prefix_cache()
    poison(llm)
    assert_right(run(llm, asked, 20), pattern)
