# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/metrics/loggers.py, vllm/v1/metrics/prometheus.py @ v0.25.0
"""The metrics of /metrics: upstream's names, labels and buckets, in a registry per engine."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

LABELS = ("model_name", "engine")

SECONDS_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
SECONDS_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
SECONDS_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
UP_TO_MODEL_LEN = None
"""Stands for 1, 2, 5, 10, 20, ... up to max_model_len."""

GAUGES = {
    "num_requests_running": "Requests that are in the running batch.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of the KV cache in use; 1 is all of it.",
}
COUNTERS = {
    "prefix_cache_queries": "Tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Tokens found in the prefix cache.",
    "external_prefix_cache_queries": "Tokens that a KV connector was asked for.",
    "external_prefix_cache_hits": "Tokens that a KV connector had.",
    "num_preemptions": "Requests that were preempted.",
    "prompt_tokens": "Prompt tokens processed.",
    "prompt_tokens_cached": "Prompt tokens taken from a cache.",
    "generation_tokens": "Tokens generated.",
}
HISTOGRAMS: dict[str, tuple[str, Sequence[float] | None]] = {
    "request_prompt_tokens": ("Prompt tokens of a finished request.", UP_TO_MODEL_LEN),
    "request_generation_tokens": ("Generated tokens of a finished request.", UP_TO_MODEL_LEN),
    "request_max_num_generation_tokens": (
        "Longest sample of a finished request, in tokens.",
        UP_TO_MODEL_LEN,
    ),
    "request_prefill_kv_computed_tokens": (
        "Prompt tokens of a finished request that were computed, not cached.",
        UP_TO_MODEL_LEN,
    ),
    "request_params_n": ("Parameter n of a request.", SAMPLES),
    "request_params_max_tokens": ("Parameter max_tokens of a request.", UP_TO_MODEL_LEN),
    "iteration_tokens_total": ("Tokens of an engine step.", STEP_TOKENS),
    "time_to_first_token_seconds": ("From arrival to the first token.", SECONDS_FIRST_TOKEN),
    "inter_token_latency_seconds": ("Between two tokens of a request.", SECONDS_TOKEN),
    "request_time_per_output_token_seconds": (
        "Mean time between the tokens of a finished request.",
        SECONDS_TOKEN,
    ),
    "e2e_request_latency_seconds": ("From arrival to the last token.", SECONDS_REQUEST),
    "request_queue_time_seconds": ("Time a request waited to be scheduled.", SECONDS_REQUEST),
    "request_inference_time_seconds": ("From scheduled to the last token.", SECONDS_REQUEST),
    "request_prefill_time_seconds": ("From scheduled to the first token.", SECONDS_REQUEST),
    "request_decode_time_seconds": ("From the first token to the last.", SECONDS_REQUEST),
}


def build_buckets(mantissa_lst: list[int], max_value: int) -> list[int]:
    """`mantissa * 10**e` for e = 0, 1, ... as long as it does not exceed `max_value`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for mantissa in mantissa_lst:
            if mantissa * scale > max_value:
                return buckets
            buckets.append(mantissa * scale)
        scale *= 10


def build_1_2_5_buckets(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to `max_value`."""
    return build_buckets([1, 2, 5], max_value)


def create_registry() -> CollectorRegistry:
    """A registry of its own, with the usual process metrics; nothing in it is shared."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def create_metric(
    registry: CollectorRegistry,
    name: str,
    labels: Sequence[str],
    max_model_len: int,
) -> Gauge | Counter | Histogram:
    """The gauge, counter or histogram `vllm:<name>` of the tables above."""
    full = f"vllm:{name}"
    if name in GAUGES:
        return Gauge(full, GAUGES[name], labels, registry=registry)
    if name in COUNTERS:
        return Counter(full, COUNTERS[name], labels, registry=registry)
    documentation, buckets = HISTOGRAMS[name]
    if buckets is UP_TO_MODEL_LEN:
        buckets = build_1_2_5_buckets(max_model_len)
    return Histogram(full, documentation, labels, buckets=buckets, registry=registry)


def render_metrics(registry: CollectorRegistry) -> bytes:
    """The text exposition of everything in `registry`."""
    return generate_latest(registry)
