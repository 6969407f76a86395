# SPDX-License-Identifier: Apache-2.0
"""Section `invariant` of gpu_check: kernel.batch_invariant on a GPU, its price, and a control.

Qwen3-0.6B in bfloat16, as graphs. Requests alone are compared, tokens and every log-probability bit
by bit, with the same ones in a ragged batch, in small steps, after a prefix hit, after preemptions,
and without graphs. In default mode at least one of them has to differ, or the check says nothing.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

from vllmx import LLM, SamplingParams

from .gpu_check import DECODE_BATCHES, EAGER, QWEN3_06B, Report, _timed, engine, folder_of
from .gpu_check import prompts_of as prompts_of_lengths

REQUESTS = 24
OUTPUT = 48
SHAPE = {"scheduler__max_num_seqs": 256, "scheduler__max_num_batched_tokens": 8192}
SHAPE |= {"model__max_model_len": 4096, "cache__kv_cache_memory_bytes": 8 << 30}
SHAPE |= {"cache__enable_prefix_caching": True}
WAYS: dict[str, dict[str, Any]] = {
    "together": {},
    "small steps": {"scheduler__max_num_batched_tokens": 300},
    "in pieces": {"scheduler__long_prefill_token_threshold": 100},
    "eager": EAGER,
    "small pool": {"cache__num_gpu_blocks_override": 400, "model__max_model_len": 2048},
}


def check_invariant(report: Report) -> None:
    """Bits under every way, in both modes, then the figures of both."""
    folder = folder_of(QWEN3_06B)
    for mode, invariant in (("invariant", True), ("default", False)):
        common = SHAPE | {"kernel__batch_invariant": invariant}
        llm = engine(folder, **common)
        want = [answer for i in range(REQUESTS) for answer in _answers(llm, [i])]
        report.add("invariant", f"{mode}, after prefix hits", _equal(_answers(llm), want))
        _drop(llm)
        for way, options in WAYS.items():
            llm = engine(folder, **(common | options))
            report.add("invariant", f"{mode}, {way}", _equal(_answers(llm), want))
            _drop(llm)
    for mode, invariant in (("default", False), ("invariant", True)):
        llm = engine(folder, **(SHAPE | {"kernel__batch_invariant": invariant}))
        for batch in DECODE_BATCHES:
            report.add("invariant", f"{mode}, decode_b{batch}", _timed(llm, batch, 16, 128, 2))
        report.add("invariant", f"{mode}, decode_b32 at 2048", _timed(llm, 32, 2048, 64, 1))
        report.add("invariant", f"{mode}, prefill_8x2048", _timed(llm, 8, 2048, 1, 2))
        _drop(llm)


def _requests() -> tuple[list[Any], list[SamplingParams]]:
    """Ragged prompts, some with a common beginning; greedy, seeded, filtered, with logprobs."""
    prompts = prompts_of_lengths(REQUESTS, (1, 700), QWEN3_06B["vocab_size"], seed=5)
    for prompt in prompts[::3]:
        prompt["prompt_token_ids"] = prompts[1]["prompt_token_ids"] + prompt["prompt_token_ids"]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 50},
        {"temperature": 0.0, "repetition_penalty": 1.2},
    ]
    return prompts, [
        SamplingParams(
            **kinds[i % len(kinds)],
            seed=i,
            logprobs=5,
            max_tokens=OUTPUT,
            ignore_eos=True,
            detokenize=False,
        )
        for i in range(REQUESTS)
    ]


def _answers(llm: LLM, which: list[int] | None = None) -> list[tuple[Any, ...]]:
    prompts, params = _requests()
    which = list(range(REQUESTS)) if which is None else which
    outputs = llm.generate([prompts[i] for i in which], [params[i] for i in which], use_tqdm=False)
    found = []
    for output in outputs:
        answer = output.outputs[0]
        assert answer.logprobs is not None
        rows = [[(t, v.logprob) for t, v in row.items()] for row in answer.logprobs]
        found.append((tuple(answer.token_ids), rows))
    return found


def _equal(got: list[tuple[Any, ...]], want: list[tuple[Any, ...]]) -> str:
    same = sum(g == w for g, w in zip(got, want, strict=True))
    tokens = sum(g[0] == w[0] for g, w in zip(got, want, strict=True))
    return f"{same} of {len(want)} requests equal bit by bit, {tokens} in their tokens"


def _drop(llm: LLM) -> None:
    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    torch.cuda.empty_cache()
