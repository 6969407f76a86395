# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/benchmarks/latency.py, vllm/benchmarks/throughput.py @ v0.25.0
"""`vllmx bench latency|throughput|...`: one JSON object, with upstream's keys, on stdout."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllmx.config import RunConfig
from vllmx.exceptions import UserError
from vllmx.tasks import local
from vllmx.tasks.sampling import check_shown, given

if TYPE_CHECKING:
    from vllmx.entrypoints.llm import LLM
    from vllmx.sampling_params import SamplingParams

PERCENTAGES = [10, 25, 50, 75, 90, 99]
LARGEST_TOKEN_ID = 10000  # exclusive; upstream draws its prompts from the same range


def run(config: RunConfig, started: float) -> int:
    """Measure what bench.kind says; the result goes to bench.output_json or stdout."""
    check_shown(given(config.sampling), "text")
    if config.bench.output_json is not None and not Path(config.bench.output_json).parent.is_dir():
        raise UserError(f"bench.output_json={config.bench.output_json!r}: there is no such folder.")
    if config.bench.kind == "overhead":
        from vllmx.tasks.bench_overhead import measure_overhead

        results = measure_overhead(config)
    elif config.bench.kind == "side-by-side":
        from vllmx.tasks.bench_side_by_side import measure_side_by_side

        results = measure_side_by_side(config)
    elif config.bench.kind == "startup":
        from vllmx.tasks.bench_startup import measure_startup

        results = measure_startup(config)
    elif config.bench.kind == "kernels":
        from vllmx.tasks.bench_kernels import measure_kernels

        results = measure_kernels(config)
    elif config.bench.kind == "serve":
        from vllmx.tasks.bench_serve import measure_serve

        results = measure_serve(config)
    elif config.bench.kind == "latency":
        results = measure_latency(config)
    else:
        results = measure_throughput(config)
    text = json.dumps(results, indent=4)
    if config.bench.output_json is None:
        print(text)
    else:
        Path(config.bench.output_json).write_text(text + "\n", encoding="utf-8")
    return 0


def measure_latency(config: RunConfig) -> dict[str, Any]:
    """Seconds that a batch of bench.batch_size requests takes, over bench.num_iters runs."""
    bench = config.bench
    params = bench_params(config)
    with local.load(config) as llm:
        prompts = random_prompts(config, llm, bench.batch_size)

        def once() -> float:
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            return time.perf_counter() - start

        for _ in _progress(range(bench.num_iters_warmup), "warm-up"):
            once()
        latencies = np.array([once() for _ in _progress(range(bench.num_iters), "measure")])
    average = float(latencies.mean())
    rate = bench.batch_size * params.n * bench.output_len / average
    print(f"vllmx: avg latency {average:.3f} s, {rate:.1f} output tok/s", file=sys.stderr)
    return {
        "avg_latency": average,
        "latencies": latencies.tolist(),
        "percentiles": dict(zip(PERCENTAGES, np.percentile(latencies, PERCENTAGES).tolist())),
    }


def measure_throughput(config: RunConfig) -> dict[str, Any]:
    """Requests and tokens a second when bench.num_prompts requests are there at once."""
    bench = config.bench
    params = bench_params(config)
    with local.load(config) as llm:
        prompts = random_prompts(config, llm, bench.num_prompts)
        for _ in _progress(range(bench.num_iters_warmup), "warm-up"):
            llm.generate(prompts[: config.scheduler.max_num_seqs], params, use_tqdm=False)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=config.load.use_tqdm_on_load)
        elapsed = time.perf_counter() - start
    num_output = sum(len(part.token_ids) for output in outputs for part in output.outputs)
    total = num_output + sum(len(output.prompt_token_ids or ()) for output in outputs)
    print(
        f"vllmx: {len(prompts) / elapsed:.2f} requests/s, {total / elapsed:.2f} total tok/s, "
        f"{num_output / elapsed:.2f} output tok/s",
        file=sys.stderr,
    )
    return {
        "elapsed_time": elapsed,
        "num_requests": len(prompts),
        "total_num_tokens": total,
        "requests_per_second": len(prompts) / elapsed,
        "tokens_per_second": total / elapsed,
    }


def bench_params(config: RunConfig) -> SamplingParams:
    """Upstream's: temperature 1, exactly output_len tokens; the sampling node wins over that."""
    from vllmx.sampling_params import SamplingParams

    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "ignore_eos": True,
        "max_tokens": config.bench.output_len,
        "detokenize": not config.bench.disable_detokenize,
    }
    return SamplingParams(**{**defaults, **given(config.sampling)})


def random_prompts(config: RunConfig, llm: LLM, number: int) -> list[dict[str, list[int]]]:
    """`number` prompts of bench.input_len random token ids, the same for the same model.seed.

    UserError if they and their outputs are longer than the engine allows.
    """
    limit = llm.model_config.max_model_len
    length = config.bench.input_len + config.bench.output_len
    if limit is not None and length > limit:
        raise UserError(
            f"bench.input_len + bench.output_len = {length} exceeds max_model_len = {limit}; "
            "lower one of them."
        )
    rng = np.random.default_rng(config.model.seed)
    high = min(LARGEST_TOKEN_ID, llm.model_config.get_vocab_size())
    ids = rng.integers(high, size=(number, config.bench.input_len))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def _progress(items: range, text: str) -> Any:
    from tqdm import tqdm

    return tqdm(items, desc=text, file=sys.stderr, leave=False)
