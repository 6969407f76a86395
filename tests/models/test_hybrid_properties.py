# SPDX-License-Identifier: Apache-2.0
"""Any mix of requests to a model with recurrent layers gets the answers that stand in its rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hybrid_model import VOCAB, expected, hybrid_engine, registered, save_hybrid
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllmx import SamplingParams
from vllmx.layers.mamba_base import mamba_layers

MAX_MODEL_LEN = 96
PATTERNS = ("SA", "SSA", "SASSS", "S")


@dataclass(frozen=True)
class Asked:
    """A prompt of the first `common` tokens that all share and `own` of its own; comes before step
    `arrival` and is aborted after `patience` steps, if it has not ended."""

    common: int
    own: int
    max_tokens: int
    arrival: int
    patience: int

    def prompt(self, number: int) -> list[int]:
        shared = [3 + 31 * i % (VOCAB - 3) for i in range(self.common)]
        return shared + [3 + (17 * i + 7 * number) % (VOCAB - 3) for i in range(self.own)]


ASKED = st.builds(
    Asked,
    common=st.sampled_from((0, 8, 16, 17, 40)),
    own=st.integers(1, 24),
    max_tokens=st.integers(1, 30),
    arrival=st.integers(0, 20),
    patience=st.sampled_from((3, 9, 1000, 1000, 1000)),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    with registered():
        yield {p: save_hybrid(tmp_path_factory.mktemp("hybrid"), p) for p in PATTERNS}


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    pattern=st.sampled_from(PATTERNS),
    caching=st.booleans(),
    block_size=st.sampled_from((4, 8, 16)),
    spare_blocks=st.integers(0, 40),
    budget=st.sampled_from((16, 19, 64)),
    max_num_seqs=st.integers(1, 6),
    ahead=st.booleans(),
    reset_at=st.sampled_from((None, None, 7, 15)),
    asked=st.lists(ASKED, min_size=1, max_size=8),
)
def test_answers_are_those_of_the_rule(
    folders,
    pattern,
    caching,
    block_size,
    spare_blocks,
    budget,
    max_num_seqs,
    ahead,
    reset_at,
    asked,
) -> None:
    # The longest request, its states, and the null block.
    least = -(-MAX_MODEL_LEN // 8) + 2 * (len(pattern)) + 1
    llm = hybrid_engine(
        folders[pattern],
        block_size=block_size,
        enable_prefix_caching=caching,
        num_gpu_blocks_override=least + spare_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        async_scheduling=ahead,
    )
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    for layer in mamba_layers(runner.model).values():
        for state in layer.kv_cache:
            state[1:].fill_(float("nan"))
    answers = drive(llm.llm_engine, asked, reset_at)
    for number, request in enumerate(asked):
        tokens = answers[number]
        if request.patience == 1000:
            assert len(tokens) == request.max_tokens
        assert tokens == expected(pattern, request.prompt(number), len(tokens))
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1


def drive(engine: Any, asked: list[Asked], reset_at: int | None) -> dict[int, list[int]]:
    """Step to the end; the tokens of each request, as many as it got. Before step `reset_at` all
    that run are preempted and the prefix cache is emptied."""
    answers: dict[int, list[int]] = {i: [] for i in range(len(asked))}
    for step in range(3000):
        for number, request in enumerate(asked):
            if request.arrival == step:
                params = SamplingParams(
                    temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True
                )
                prompt = {"prompt_token_ids": request.prompt(number)}
                engine.add_request(str(number), prompt, params)
            if request.arrival + request.patience == step:
                engine.abort_request([str(number)])
        if step == reset_at:
            engine.reset_prefix_cache(reset_running_requests=True)
        if step > 20 and not engine.has_unfinished_requests():
            return answers
        for output in engine.step():
            answers[int(output.request_id)] = list(output.outputs[0].token_ids)
    raise AssertionError("still busy")
