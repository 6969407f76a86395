# SPDX-License-Identifier: Apache-2.0
"""The least time that a batch can take on a device: bytes over its bandwidth, FLOPs over its rate.

A decode step reads every weight but the rows of the embedding that it doesn't look up, and the
keys and values of the context; a prefill multiplies every token with every weight. Both rates are
measured on the device at hand. Dense decoders with grouped-query attention only.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

DENSE = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
"""Model types whose layers are what `work_of` counts."""


@dataclass(frozen=True)
class Limits:
    """What a device can do, as measured: bytes a second read and written, FLOP a second in bf16."""

    bandwidth: float
    flops: float


@dataclass(frozen=True)
class ModelWork:
    """Bytes and FLOPs of a model whose weights and cache are of `element` bytes."""

    weight_bytes: int
    kv_bytes_per_token: int
    flops_per_token: int
    attention_flops_per_pair: int
    """FLOPs for each token attended to by a token."""


def work_of(config: dict[str, Any], element: int = 2) -> ModelWork | None:
    """What config.json says; None for a model of another make."""
    if config.get("model_type") not in DENSE:
        return None
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or hidden // heads
    layers = config["num_hidden_layers"]
    layer = hidden * head * (heads + 2 * kv_heads) + heads * head * hidden + 3 * hidden * inner
    weights = layers * layer + hidden * config["vocab_size"]
    return ModelWork(
        weight_bytes=weights * element,
        kv_bytes_per_token=layers * 2 * kv_heads * head * element,
        flops_per_token=2 * layers * layer,
        attention_flops_per_pair=4 * layers * heads * head,
    )


def floor_seconds(
    work: ModelWork, head_flops: int, limits: Limits, batch: int, input_len: int, output_len: int
) -> float:
    """The floor of `batch` requests: their prompts, then a step for each token after the first.

    head_flops: FLOPs of the output head for one token.
    """
    tokens = batch * input_len
    pairs = batch * input_len * (input_len + 1) // 2
    prefill = tokens * work.flops_per_token + pairs * work.attention_flops_per_pair
    seconds = max(
        (prefill + batch * head_flops) / limits.flops, work.weight_bytes / limits.bandwidth
    )
    steps = output_len - 1
    if steps:
        context = input_len + output_len / 2
        moved = work.weight_bytes + batch * context * work.kv_bytes_per_token
        flops = batch * (
            work.flops_per_token + head_flops + context * work.attention_flops_per_pair
        )
        seconds += steps * max(moved / limits.bandwidth, flops / limits.flops)
    return seconds


def measure_limits(repeats: int = 5) -> Limits:
    """Of the CUDA device: a copy of 4 GiB, and a product of 8192 x 8192 random bf16 matrices."""
    import torch

    size = 4 << 30
    both = torch.empty(2, size, dtype=torch.uint8, device="cuda").random_()
    copy = _seconds(lambda: both[1].copy_(both[0]), repeats)
    square = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    product = _seconds(lambda: square[0] @ square[1], repeats)
    return Limits(bandwidth=2 * size / copy, flops=2 * 8192**3 / product)


def _seconds(call: Any, repeats: int) -> float:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(10):
            call()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    return statistics.median(times)
