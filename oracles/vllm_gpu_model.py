# SPDX-License-Identifier: Apache-2.0
"""Oracle: whole models in upstream vLLM on a GPU, bfloat16, as CUDA graphs and eagerly.

`python -m oracles.vllm_gpu_model JOB OUT [--eager]`, where upstream's CUDA build and a GPU are; the
files are described in oracles/model_job.py. The second model runner answers. How far its eager
steps are from its graphs is the noise that a verdict on a GPU must know.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from oracles import vllm_pin
from oracles.model_job import Answer, Job, main
from oracles.vllm_gpu_ops import available
from oracles.vllm_model import answer_of

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}
EAGER = "--eager"


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
        "runner": "v2",
        "reps": 1,
    }


def compute(job: Job) -> Answer:
    """Continue and score the sequences of `job`."""
    os.environ.update(SETTINGS)
    eager = EAGER in sys.argv
    return answer_of(job, dtype="bfloat16", enforce_eager=eager, kv_cache_memory_bytes=2 << 30)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    raise SystemExit(main("vllm_gpu_model", available, describe, compute))
