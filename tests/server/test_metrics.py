# SPDX-License-Identifier: Apache-2.0
"""Metric names, types, labels and buckets; the log line; engines that share nothing."""

from __future__ import annotations

import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllmx.config import ModelConfig, VllmConfig
from vllmx.engine import FinishReason
from vllmx.metrics.loggers import LoggingStatLogger, PrometheusStatLogger, StatLoggerManager
from vllmx.metrics.prometheus import build_1_2_5_buckets, render_metrics
from vllmx.metrics.stats import FinishedRequestStats, IterationStats, SchedulerStats

GAUGES = {
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("kv_cache_usage_perc", "cache_config_info"),
}
COUNTERS = {
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens"),
    *("prompt_tokens_by_source", "prompt_tokens_cached", "generation_tokens", "request_success"),
}
HISTOGRAMS = {
    *("request_prompt_tokens", "request_generation_tokens", "iteration_tokens_total"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
    *("request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds"),
    "request_prefill_kv_computed_tokens",
}


def config(name: str = "tiny") -> VllmConfig:
    """A config with a length and a number of blocks."""
    vllm_config = VllmConfig(model_config=ModelConfig(name=name, max_model_len=128))
    vllm_config.cache_config.num_gpu_blocks = 7
    return vllm_config


def families(manager: StatLoggerManager) -> dict[str, object]:
    """The metric families of a manager's registry, by name."""
    text = render_metrics(manager.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def sample(manager: StatLoggerManager, name: str, **labels: str) -> float | None:
    """One sample of a manager's registry."""
    return manager.registry.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def test_core_set_has_upstreams_names_types_and_labels() -> None:
    manager = StatLoggerManager(config())
    manager.log_engine_initialized()
    found = families(manager)
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS)):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert family.samples, name
            for item in family.samples:
                assert {"engine"} <= set(item.labels), name
                assert name == "cache_config_info" or item.labels["model_name"] == "tiny"
    reasons = {s.labels["finished_reason"] for s in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}
    info = found["vllm:cache_config_info"].samples[0].labels
    assert (info["block_size"], info["num_gpu_blocks"]) == ("None", "7")
    assert info["enable_prefix_caching"] == "True"


def test_buckets_end_at_the_longest_that_fits() -> None:
    assert build_1_2_5_buckets(128) == [1, 2, 5, 10, 20, 50, 100]
    assert build_1_2_5_buckets(1) == [1]


def test_two_engines_share_no_metric() -> None:
    first, second = StatLoggerManager(config()), StatLoggerManager(config())
    first.record(SchedulerStats(num_running_reqs=3, num_waiting_reqs=2), None)
    assert sample(first, "vllm:num_requests_running") == 3
    assert sample(first, "vllm:num_requests_waiting") == 2
    assert sample(first, "vllm:num_requests_waiting_by_reason", reason="capacity") == 2
    assert sample(second, "vllm:num_requests_running") == 0


def test_finished_request_is_observed_once_everywhere() -> None:
    manager = StatLoggerManager(config())
    stats = IterationStats()
    stats.finished_requests = [
        FinishedRequestStats(
            finish_reason=FinishReason.STOP,
            e2e_latency=2.0,
            num_prompt_tokens=30,
            num_generation_tokens=4,
            max_tokens_param=16,
            num_cached_tokens=20,
        )
    ]
    manager.record(None, stats)
    assert sample(manager, "vllm:request_success_total", finished_reason="stop") == 1
    for name, value in (
        ("e2e_request_latency_seconds", 2.0),
        ("request_prompt_tokens", 30),
        ("request_generation_tokens", 4),
        ("request_params_max_tokens", 16),
        ("request_prefill_kv_computed_tokens", 10),
    ):
        assert sample(manager, f"vllm:{name}_sum") == value
        assert sample(manager, f"vllm:{name}_count") == 1


def test_log_line_shows_rates_and_queues_and_is_quiet_when_idle(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stat_logger = LoggingStatLogger(config())
    stat_logger.last_log_time -= 10.0
    stats = IterationStats()
    stats.num_generation_tokens = 50
    stats.num_preempted_reqs = 1
    stat_logger.record(SchedulerStats(2, 3, kv_cache_usage=0.25), stats)
    with caplog.at_level(logging.DEBUG, logger="vllmx"):
        stat_logger.log()
        stat_logger.log()
        stat_logger.log()
    first, _, third = caplog.records
    for part in (
        "Avg generation throughput: 5.0 tokens/s",
        "Running: 2 reqs",
        "Waiting: 3 reqs",
        "Preemptions: 1",
        "KV cache usage: 25.0%",
    ):
        assert part in first.getMessage()
    assert (first.levelno, third.levelno) == (logging.INFO, logging.DEBUG)


def test_own_loggers_are_told_as_well() -> None:
    seen: list[object] = []

    class Spy(LoggingStatLogger):
        def record(self, *args: object, **kwargs: object) -> None:  # type: ignore[override]
            seen.append(args)

    manager = StatLoggerManager(config(), custom_stat_loggers=[Spy])
    manager.record(SchedulerStats(), None)
    assert len(seen) == 1
    assert any(isinstance(item, PrometheusStatLogger) for item in manager.stat_loggers)
