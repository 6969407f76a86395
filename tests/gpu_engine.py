# SPDX-License-Identifier: Apache-2.0
"""Engines and prompts of the tests on a GPU."""

from __future__ import annotations

import random
from typing import Any

from checkpoints import VOCAB, build_engine

from vllmx import LLM, SamplingParams

LIMITS = {
    "dtype": "float32",
    "max_num_seqs": 20,
    "max_num_batched_tokens": 256,
    "max_model_len": 256,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
}


def engine(folder: Any, **options: Any) -> LLM:
    """A small engine on the GPU."""
    return build_engine(folder, **{**LIMITS, **options})


def prompts(number: int, longest: int = 100) -> list[dict[str, list[int]]]:
    """Prompts of random ids, the same on every call."""
    rng = random.Random(7)
    lengths = [rng.randint(1, longest) for _ in range(number)]
    return [{"prompt_token_ids": [rng.randrange(3, VOCAB) for _ in range(n)]} for n in lengths]


def greedy(tokens: int, **options: Any) -> SamplingParams:
    """The likeliest tokens, that many."""
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options
    )


def answers(llm: LLM, given: list[Any], params: Any) -> list[tuple[list[int], str | None]]:
    """(token ids, why it ended) of each."""
    outputs = llm.generate(given, params, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in outputs]


def runner_of(llm: LLM) -> Any:
    """The model runner inside an engine of this process."""
    core: Any = llm.llm_engine.engine_core
    return core.engine_core.model_executor.driver_worker.model_runner
