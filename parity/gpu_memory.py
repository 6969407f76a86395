# SPDX-License-Identifier: Apache-2.0
"""Section `memory` of gpu_check: what a start foresees of a GPU's memory, and what then comes.

The largest step is foreseen by running it; afterwards as many requests as may run are served in
steps as large as may be, and torch's peak is compared with what was set aside for it.
"""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

import torch

from vllmx import SamplingParams
from vllmx.exceptions import UserError
from vllmx.worker.device_memory import CudaMemory

from .gpu_check import QWEN3_06B, Report, engine, folder_of, prompts_of, tokens_of

LIMITS = ((2048, 128), (8192, 256))
"""Tokens of a step, requests of a step."""
UTILIZATION = 0.5


def check_memory(report: Report) -> None:
    """The profile of two limits, what was taken after it, and starts that can't succeed."""
    folder = folder_of(QWEN3_06B)
    for tokens, requests in LIMITS:
        name = f"{tokens} tokens, {requests} requests"
        report.add("memory", name, _foreseen_and_met(folder, tokens, requests))
        gc.collect()
        torch.cuda.empty_cache()
    for name, options in {
        "utilization 0.005": {"cache__gpu_memory_utilization": 0.005},
        "a cache of 1 TiB": {"cache__kv_cache_memory_bytes": 1 << 40},
    }.items():
        try:
            engine(folder, model__max_model_len=4096, **options)
            report.add("memory", name, "bad: it started")
        except UserError as error:
            report.add("memory", name, str(error))
        gc.collect()
        torch.cuda.empty_cache()


def _foreseen_and_met(folder: str, tokens: int, requests: int) -> dict[str, Any]:
    llm = engine(
        folder,
        scheduler__max_num_batched_tokens=tokens,
        scheduler__max_num_seqs=requests,
        model__max_model_len=4096,
        cache__gpu_memory_utilization=UTILIZATION,
    )
    core = llm.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
    worker = core.model_executor.driver_worker
    profile, memory = worker.memory_profile, CudaMemory()
    memory.reset_peak()
    start = memory.snapshot()
    length = max(tokens // requests, 1)
    prompts = prompts_of(2 * requests, (length, 2 * length), QWEN3_06B["vocab_size"])
    hard = SamplingParams(
        temperature=1.0,
        top_k=1000,
        top_p=0.9,
        min_p=0.01,
        repetition_penalty=1.1,
        logprobs=20,
        max_tokens=16,
        ignore_eos=True,
        detokenize=False,
    )
    tokens_of(llm, prompts, hard)
    end = memory.snapshot()
    rise = end.torch_peak - start.allocated
    used = start.total_memory - end.free_memory
    return {
        "profile_bytes": asdict(profile) | {"kv_cache": profile.kv_cache},
        "graphs_taken_bytes": worker.graphs_memory,
        "peak_rise_bytes": rise,
        "device_used_bytes": used,
        "allowed_bytes": profile.requested + start.total_memory - profile.free_before,
        # The tables are in what was foreseen, and stand in `allocated` by now.
        "fits": rise <= profile.activations,
        "within_utilization": used <= profile.requested + start.total_memory - profile.free_before,
    }
