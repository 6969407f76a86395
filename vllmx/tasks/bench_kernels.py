# SPDX-License-Identifier: Apache-2.0
"""`vllmx bench kernels`: the time of every provider of the ops that models spend theirs in.

The times are written where `kernel=auto` finds them (vllmx/ir/measured.py). Ops whose provider also
decides how layers are put together, such as packed linear layers, are not among them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.attention.selector import all_backends
from vllmx.config import RunConfig, finalize
from vllmx.ir.measured import Measured, in_words, load
from vllmx.ir.op import REFERENCE, IrOpImpl, OpContext
from vllmx.ir.select import load_ops
from vllmx.platform import kernel_cache_dir, num_threads, resolve_device, torch_dtype
from vllmx.worker.cudagraph_utils import capture

ROWS = {"cpu": (1, 64), "cuda": (1, 64, 2048)}
"""Tokens that row by row ops are tried with."""
HIDDEN_SIZES = (64, 128, 256, 512, 1024, 2048, 4096)
HEAD_SIZES = (64, 128, 256)
BATCHES = {
    # (new tokens, tokens in all) of each request, requests
    "cpu": ((1, 256, 1), (1, 256, 8), (128, 128, 1)),
    "cuda": ((1, 1024, 1), (1, 1024, 64), (2048, 2048, 1)),
}
HEADS, KV_HEADS, BLOCK_SIZE = 16, 8, 16
SECONDS = 0.004
"""How long a call is repeated, at least, each of bench.num_iters times."""
SLOW_SECONDS = 0.05
"""A call that takes longer than this on a CPU is not repeated."""
CALLS_OF_A_GRAPH = 20


@dataclass(frozen=True)
class Trial:
    """One call: `name` says what it is tried with, facts what a layer would tell of it."""

    op: str
    name: str
    facts: dict[str, Any]
    inputs: dict[str, Any]


def measure_kernels(config: RunConfig) -> dict[str, Any]:
    """Seconds of each provider by op, dtype, class of shapes and trial; also written to the cache.

    What the cache says of other dtypes stays.
    """
    vllm_config = finalize(config)
    device = resolve_device(config.device)
    dtype = _dtype(vllm_config.model_config.dtype, device)
    if device == "cpu":
        torch.set_num_threads(num_threads(config.device))
    folder = kernel_cache_dir(config.kernel.cache_dir)
    found = load(device, folder)
    classes: dict[str, Trial] = {}
    for trial in trials(device, dtype):
        key = Measured.key(trial.op, dtype, trial.facts)
        if key not in classes:
            classes[key], found.times[key] = trial, {}
        for impl in providers(trial, device, dtype):
            try:
                with torch.inference_mode():
                    seconds = seconds_of(call_of(impl, trial), device, config.bench.num_iters)
            except Exception as error:  # whatever a library raises: it is not chosen then
                print(f"{key}: not {impl.provider}: {error}", file=sys.stderr)
                continue
            found.times[key].setdefault(impl.provider, {})[trial.name] = seconds
    for key, trial in classes.items():
        print(f"{key}: {in_words(found.scores(trial.op, dtype, trial.facts))}", file=sys.stderr)
    path = found.save(device, folder)
    print(f"vllmx: kernel=auto goes by {path}", file=sys.stderr)
    return {"path": str(path), "times": {key: found.times[key] for key in classes}}


def _dtype(name: str, device: str) -> torch.dtype:
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    return torch_dtype({"half": "float16", "float": "float32"}.get(name, name))


def trials(device: str, dtype: torch.dtype) -> Iterator[Trial]:
    """Every call that is tried, its inputs drawn from a seed."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(device, dtype)

    for hidden, rows in itertools.product(HIDDEN_SIZES, ROWS[device]):
        name, facts = f"{rows} rows", {"hidden_size": hidden}
        norm = {"weight": normal(hidden), "epsilon": 1e-6}
        yield Trial("rms_norm", name, facts, {"x": normal(rows, hidden), **norm})
        both = {"x": normal(rows, hidden), "x_residual": normal(rows, hidden)}
        yield Trial("fused_add_rms_norm", name, facts, {**both, **norm})
    for rows, width in itertools.product(ROWS[device], (2048, 6144)):
        name = f"{rows} rows of {width}"
        for op in ("silu_and_mul", "gelu_and_mul"):
            yield Trial(op, name, {}, {"x": normal(rows, 2 * width)})
    for size, rows in itertools.product(HEAD_SIZES, ROWS[device]):
        rotation = {"head_size": size, "rotary_dim": size, "is_neox_style": True}
        angles = torch.rand(4096, size, generator=draw).to(device)
        inputs = {
            "positions": torch.arange(rows, device=device),
            "query": normal(rows, HEADS * size),
            "key": normal(rows, KV_HEADS * size),
            "head_size": size,
            "cos_sin_cache": angles,
        }
        yield Trial("rotary_embedding", f"{rows} rows", rotation, inputs)
    for size, window in itertools.product(HEAD_SIZES, (None, 128)):
        for new, length, requests in BATCHES[device]:
            inputs = _attention(new, length, requests, size, device, normal)
            layer: dict[str, Any] = {"head_size": size, "kv_cache_dtype": dtype}
            layer["sliding_window"] = window
            name = f"{requests} x {new} of {length} tokens"
            yield Trial("paged_attention", name, layer, {**inputs, "sliding_window": window})


def _attention(
    new: int, length: int, requests: int, size: int, device: str, normal: Callable[..., Tensor]
) -> dict[str, Any]:
    pages = -(-length // BLOCK_SIZE)
    cache = normal(requests * pages + 1, BLOCK_SIZE, 2, KV_HEADS, size)
    table = torch.arange(1, requests * pages + 1, dtype=torch.int32).view(requests, pages)
    starts = torch.arange(requests + 1, dtype=torch.int32) * new
    return {
        "query": normal(requests * new, HEADS, size),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": table.to(device),
        "query_start_loc": starts.to(device),
        "seq_lens": torch.full((requests,), length, dtype=torch.int32, device=device),
        "scale": size**-0.5,
    }


def providers(trial: Trial, device: str, dtype: torch.dtype) -> list[IrOpImpl]:
    """Those that take a trial's call; on a GPU, attention must be fit for CUDA graphs."""
    op = load_ops()[trial.op]
    context = OpContext(device, dtype, trial.facts)
    found = [impl for impl in op.impls.values() if impl.refusal(context) is None]
    if trial.op == "paged_attention" and device == "cuda":
        known = all_backends()
        return [impl for impl in found if known[impl.provider].supports_cudagraph()]
    if device == "cuda":
        # Definitions of many small kernels are no rivals, and some ask the device.
        return [impl for impl in found if impl.provider != REFERENCE]
    return found


def call_of(impl: IrOpImpl, trial: Trial) -> Callable[[], Any]:
    """The call, with all made ready that an engine makes ready before a step."""
    inputs = dict(trial.inputs)
    if trial.op == "paged_attention":
        return _attention_call(impl.provider, inputs)
    if impl.prepare is not None:
        inputs["prepared"] = impl.prepare(*(inputs.pop(k) for k in impl.op.static_args))
    return lambda: impl.fn(**inputs)


def _attention_call(name: str, inputs: dict[str, Any]) -> Callable[[], Any]:
    backend = all_backends()[name]
    starts, lengths = (inputs[k].cpu().numpy() for k in ("query_start_loc", "seq_lens"))
    common = CommonAttentionMetadata(
        query_start_loc=inputs["query_start_loc"],
        query_start_loc_np=starts,
        seq_lens=inputs["seq_lens"],
        seq_lens_np=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(starts[1] - starts[0]),
        max_seq_len=int(lengths.max()),
        block_table_tensor=inputs["block_table"],
        slot_mapping=torch.empty(0, dtype=torch.int64, device=inputs["query"].device),
    )
    metadata = backend.get_builder_cls()(BLOCK_SIZE, inputs["query"].device).build(common)
    cache = (inputs["key_cache"], inputs["value_cache"])
    scale, window = inputs["scale"], inputs["sliding_window"]
    return lambda: backend.run(inputs["query"], *cache, metadata, scale, window, None)


def seconds_of(call: Callable[[], Any], device: str, repeats: int) -> float:
    """Seconds of one call: the median of `repeats` measurements; a slow one's first."""
    start = time.perf_counter()
    call()
    first = time.perf_counter() - start
    if device == "cpu" and first > SLOW_SECONDS:
        return first
    measured = _on_gpu if device == "cuda" else _on_cpu
    return statistics.median(measured(call) for _ in range(max(repeats, 1)))


def _on_cpu(call: Callable[[], Any]) -> float:
    calls, start = 0, time.perf_counter()
    while True:
        call()
        calls += 1
        elapsed = time.perf_counter() - start
        if elapsed >= SECONDS:
            return elapsed / calls


def _on_gpu(call: Callable[[], Any]) -> float:
    """By a CUDA graph of several calls: the host's part is not counted."""

    def several() -> Tensor:
        for _ in range(CALLS_OF_A_GRAPH):
            call()
        return torch.empty(0, device="cuda")

    torch.cuda.synchronize()
    graph, _ = capture(several, torch.cuda.graph_pool_handle(), torch.cuda.Stream())
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS_OF_A_GRAPH
