# SPDX-License-Identifier: Apache-2.0
"""Oracle: whole models in upstream vLLM on a GPU, bfloat16, as CUDA graphs and eagerly.

`python -m oracles.vllm_gpu_model JOB OUT [--eager]`, where upstream's CUDA build and a GPU are; the
files are described in oracles/model_job.py. The golden says which of upstream's model runners
answered: its second, but for hybrids and most experts. How far eager steps are from graphs is the
noise that a verdict on a GPU must know.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from oracles import gdn_reference, vllm_pin
from oracles.model_job import Answer, Job, main
from oracles.vllm_gpu_ops import available
from oracles.vllm_model import answer_of

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
EAGER = "--eager"
OPTIONS = {
    "dtype": "bfloat16",
    "kv_cache_memory_bytes": 2 << 30,
    # Looked at before anything is loaded, although it says nothing where the cache's size is
    # given: with more, engines that start side by side refuse one another.
    "gpu_memory_utilization": 0.05,
}


def describe(job: Job) -> dict[str, Any]:
    """What computed the answer to `job`."""
    import torch

    way = "eager" if EAGER in sys.argv else "graph"
    return {
        "name": "vllm",
        "version": vllm_pin.VERSION,
        "lane": f"vllm-gpu-bf16-{way}",
        "callable": "vllm.LLM.generate",
        "torch": torch.__version__,
        "device": f"{torch.cuda.get_device_name()} cuda {torch.version.cuda}",
        "reps": 1,
    }


def compute(job: Job) -> Answer:
    """Continue and score the sequences of `job`."""
    os.environ.update(SETTINGS)
    options: dict[str, Any] = {**OPTIONS, "enforce_eager": EAGER in sys.argv}
    if gdn_reference.is_hybrid(Path(job.folder)):
        # FlashInfer's, the default of Hopper, is compiled for minutes at its first call.
        options["gdn_prefill_backend"] = "triton"
    return answer_of(job, stream=False, **options)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    raise SystemExit(main("vllm_gpu_model", available, describe, compute))
