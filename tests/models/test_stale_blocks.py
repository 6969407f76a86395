# SPDX-License-Identifier: Apache-2.0
"""A block that is used again may hold anything of its last user, NaN included."""

from __future__ import annotations

import random

import pytest
from checkpoints import VOCAB, build_engine

from vllmx import LLM, SamplingParams
from vllmx.layers.attention import attention_layers


def answers(llm: LLM) -> list[tuple[int, ...]]:
    rng = random.Random(11)
    prompts = [
        {"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(n)]} for n in (1, 7, 20, 45)
    ]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("tiny", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("backend", ["native", "sdpa", "torch"])
def test_nan_in_used_blocks_reaches_no_later_request(tiny, backend: str) -> None:
    llm = build_engine(
        tiny[0], attention_backend=backend, max_num_batched_tokens=16, max_num_seqs=4
    )
    want = answers(llm)
    assert llm.reset_prefix_cache()
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
    for layer in attention_layers(runner.model).values():
        # All but the null block, which nobody writes to.
        layer.kv_cache[1:].fill_(float("nan"))
    assert answers(llm) == want
