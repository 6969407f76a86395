# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/metrics/loggers.py @ v0.25.0
"""Where the engine's statistics go: a line in the log now and then, and Prometheus metrics."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllmx.config import VllmConfig
from vllmx.engine import FinishReason
from vllmx.kv_transfer.metrics import KVConnectorLogging, KVConnectorProm
from vllmx.metrics.prometheus import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABELS,
    create_metric,
    create_registry,
)
from vllmx.metrics.stats import (
    CachingMetrics,
    FinishedRequestStats,
    IterationStats,
    PromptTokenStats,
    SchedulerStats,
)

logger = logging.getLogger(__name__)

WAITING_REASON_CAPACITY = "capacity"
WAITING_REASON_DEFERRED = "deferred"


class StatLoggerBase(ABC):
    """A receiver of one engine's statistics; pass a subclass as `stat_loggers=[...]` to add your
    own, or one of vllmx.metrics.aggregate.AggregateStatLoggerBase for all engines at once."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None: ...

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Take in what one engine step brought; either part may be missing."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Called once, when the KV cache has its size."""

    def log(self) -> None:  # noqa: B027
        """Called every `observability.log_stats_interval` seconds."""


StatLoggerFactory = Callable[[VllmConfig, int], StatLoggerBase]


class LoggingStatLogger(StatLoggerBase):
    """Throughput, queue lengths and cache usage as a line in the log."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self.last_scheduler_stats = SchedulerStats()
        self.prefix_caching_metrics = CachingMetrics()
        self.connector_prefix_caching_metrics = CachingMetrics()
        self.kv_connector_logging = KVConnectorLogging(vllm_config.kv_transfer_config)
        self.last_prompt_throughput = 0.0
        self.last_generation_throughput = 0.0
        self.engine_is_idle = False
        self._reset(time.monotonic())

    @property
    def log_prefix(self) -> str:
        """Begin of the line."""
        return f"Engine {self.engine_index:03d}: "

    def _reset(self, now: float) -> None:
        self.last_log_time = now
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_preemptions = 0

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add up tokens since the last line; keep the newest scheduler state."""
        if iteration_stats is not None:
            self.num_prompt_tokens += iteration_stats.prompt_token_stats.computed
            self.num_generation_tokens += iteration_stats.num_generation_tokens
            self.num_preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats is not None:
            self.prefix_caching_metrics.observe(scheduler_stats.prefix_cache_stats)
            if scheduler_stats.connector_prefix_cache_stats is not None:
                self.connector_prefix_caching_metrics.observe(
                    scheduler_stats.connector_prefix_cache_stats
                )
            if scheduler_stats.kv_connector_stats:
                self.kv_connector_logging.observe(scheduler_stats.kv_connector_stats)
            self.last_scheduler_stats = scheduler_stats

    def log(self) -> None:
        """Write the line: at level INFO, or DEBUG when nothing happened twice in a row."""
        now = time.monotonic()
        elapsed = now - self.last_log_time
        prompt = self.num_prompt_tokens / elapsed if elapsed > 0 else 0.0
        generation = self.num_generation_tokens / elapsed if elapsed > 0 else 0.0
        preemptions = self.num_preemptions
        self.engine_is_idle = not (
            prompt or generation or self.last_prompt_throughput or self.last_generation_throughput
        )
        self.last_prompt_throughput, self.last_generation_throughput = prompt, generation
        self._reset(now)

        stats = self.last_scheduler_stats
        waiting = stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
        parts = [
            f"Avg prompt throughput: {prompt:.1f} tokens/s",
            f"Avg generation throughput: {generation:.1f} tokens/s",
            f"Running: {stats.num_running_reqs} reqs",
            f"Waiting: {waiting} reqs",
        ]
        if stats.num_skipped_waiting_reqs:
            parts.append(f"Deferred: {stats.num_skipped_waiting_reqs} reqs")
        if preemptions:
            parts.append(f"Preemptions: {preemptions}")
        parts.append(f"GPU KV cache usage: {stats.kv_cache_usage * 100:.1f}%")
        parts.append(f"Prefix cache hit rate: {self.prefix_caching_metrics.hit_rate * 100:.1f}%")
        if not self.connector_prefix_caching_metrics.empty:
            hit_rate = self.connector_prefix_caching_metrics.hit_rate
            parts.append(f"External prefix cache hit rate: {hit_rate * 100:.1f}%")
        level = logging.DEBUG if self.engine_is_idle else logging.INFO
        logger.log(level, "%s%s", self.log_prefix, ", ".join(parts))
        self.kv_connector_logging.log(partial(logger.log, level))

    def log_engine_initialized(self) -> None:
        """Say how many KV blocks there are."""
        num_blocks = self.vllm_config.cache_config.num_gpu_blocks
        if num_blocks:
            logger.debug("Engine %03d: %d KV cache blocks", self.engine_index, num_blocks)


class PrometheusStatLogger(StatLoggerBase):
    """Metrics under upstream's names; one label set an engine, one registry an instance."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_index: int = 0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index
        self.registry = create_registry() if registry is None else registry
        self._labels = (vllm_config.model_config.served_names[0], str(engine_index))
        max_model_len = vllm_config.model_config.max_model_len or 1
        self.metrics: dict[str, Any] = {
            name: create_metric(self.registry, name, LABELS, max_model_len).labels(*self._labels)
            for name in (*GAUGES, *COUNTERS, *HISTOGRAMS)
        }
        self.waiting_by_reason = self._family(
            Gauge(
                "vllm:num_requests_waiting_by_reason",
                "Waiting requests: capacity (no room yet) or deferred (blocked for now).",
                (*LABELS, "reason"),
                registry=self.registry,
            ),
            (WAITING_REASON_CAPACITY, WAITING_REASON_DEFERRED),
        )
        self.prompt_tokens_by_source = self._family(
            Counter(
                "vllm:prompt_tokens_by_source",
                "Prompt tokens by where their KV came from.",
                (*LABELS, "source"),
                registry=self.registry,
            ),
            PromptTokenStats.ALL_SOURCES,
        )
        self.kv_connector_prom = KVConnectorProm(
            vllm_config,
            {kind: partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)},
            list(LABELS),
            {engine_index: list(self._labels)},
        )
        self.request_success = self._family(
            Counter(
                "vllm:request_success",
                "Finished requests by reason.",
                (*LABELS, "finished_reason"),
                registry=self.registry,
            ),
            tuple(str(reason) for reason in FinishReason),
        )

    def _family(self, metric: Any, values: tuple[str, ...]) -> dict[str, Any]:
        return {value: metric.labels(*self._labels, value) for value in values}

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Set the gauges, add to the counters, observe the histograms."""
        if scheduler_stats is not None:
            self._record_scheduler(scheduler_stats)
        if iteration_stats is not None:
            self._record_iteration(iteration_stats)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        metrics = self.metrics
        capacity, deferred = stats.num_waiting_reqs, stats.num_skipped_waiting_reqs
        metrics["num_requests_running"].set(stats.num_running_reqs)
        metrics["num_requests_waiting"].set(capacity + deferred)
        self.waiting_by_reason[WAITING_REASON_CAPACITY].set(capacity)
        self.waiting_by_reason[WAITING_REASON_DEFERRED].set(deferred)
        metrics["kv_cache_usage_perc"].set(stats.kv_cache_usage)
        metrics["prefix_cache_queries"].inc(stats.prefix_cache_stats.queries)
        metrics["prefix_cache_hits"].inc(stats.prefix_cache_stats.hits)
        if stats.connector_prefix_cache_stats is not None:
            external = stats.connector_prefix_cache_stats
            metrics["external_prefix_cache_queries"].inc(external.queries)
            metrics["external_prefix_cache_hits"].inc(external.hits)
        if stats.kv_connector_stats is not None:
            self.kv_connector_prom.observe(stats.kv_connector_stats, self.engine_index)

    def _record_iteration(self, stats: IterationStats) -> None:
        metrics = self.metrics
        prompt = stats.prompt_token_stats
        metrics["num_preemptions"].inc(stats.num_preempted_reqs)
        metrics["prompt_tokens"].inc(stats.num_prompt_tokens)
        metrics["prompt_tokens_cached"].inc(prompt.cached_tokens)
        for source, counter in self.prompt_tokens_by_source.items():
            counter.inc(prompt.get_by_source(source))
        metrics["generation_tokens"].inc(stats.num_generation_tokens)
        metrics["iteration_tokens_total"].observe(prompt.computed + stats.num_generation_tokens)
        for name, values in (
            ("request_max_num_generation_tokens", stats.max_num_generation_tokens_iter),
            ("request_params_n", stats.n_params_iter),
            ("time_to_first_token_seconds", stats.time_to_first_tokens_iter),
            ("inter_token_latency_seconds", stats.inter_token_latencies_iter),
        ):
            observe = metrics[name].observe
            for value in values:
                observe(value)
        for finished in stats.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self.request_success[str(request.finish_reason)].inc()
        computed = request.num_prompt_tokens - max(request.num_cached_tokens, 0)
        for name, value in (
            ("e2e_request_latency_seconds", request.e2e_latency),
            ("request_queue_time_seconds", request.queued_time),
            ("request_prefill_time_seconds", request.prefill_time),
            ("request_inference_time_seconds", request.inference_time),
            ("request_decode_time_seconds", request.decode_time),
            ("request_time_per_output_token_seconds", request.mean_time_per_output_token),
            ("request_prefill_kv_computed_tokens", computed),
            ("request_prompt_tokens", request.num_prompt_tokens),
            ("request_generation_tokens", request.num_generation_tokens),
        ):
            self.metrics[name].observe(value)
        if request.max_tokens_param:
            self.metrics["request_params_max_tokens"].observe(request.max_tokens_param)

    def log_engine_initialized(self) -> None:
        """Publish `vllm:cache_config_info`: a gauge of 1 with the cache's settings as labels."""
        cache = self.vllm_config.cache_config
        labels = {name: str(getattr(cache, name)) for name in cache.__dataclass_fields__}
        labels["num_gpu_blocks"] = str(cache.num_gpu_blocks)
        labels["engine"] = str(self.engine_index)
        Gauge(
            "vllm:cache_config_info",
            "Settings of the KV cache.",
            tuple(labels),
            registry=self.registry,
        ).labels(**labels).set(1)


class StatLoggerManager:
    """Hands statistics to every logger of an engine; `registry` is what /metrics shows."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_idxs: list[int] | None = None,
        custom_stat_loggers: list[StatLoggerFactory] | None = None,
        enable_default_loggers: bool = True,
    ) -> None:
        from vllmx.metrics.aggregate import AggregateStatLoggerBase, PerEngineStatLoggerAdapter

        self.engine_indexes = engine_idxs or [0]
        self.registry = create_registry()
        factories = list(custom_stat_loggers or [])
        if enable_default_loggers and logger.isEnabledFor(logging.INFO):
            factories.append(LoggingStatLogger)
        self.stat_loggers: list[StatLoggerBase] = []
        for factory in factories:
            kind: Any = factory
            if isinstance(kind, type) and issubclass(kind, AggregateStatLoggerBase):
                self.stat_loggers.append(kind(vllm_config, self.engine_indexes))
            else:
                adapter = PerEngineStatLoggerAdapter(vllm_config, self.engine_indexes, factory)
                self.stat_loggers.append(adapter)
        self.stat_loggers.append(
            PrometheusStatLogger(vllm_config, self.engine_indexes[0], self.registry)
        )

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int | None = None,
    ) -> None:
        """Pass the statistics of one engine step on to every logger."""
        for stat_logger in self.stat_loggers:
            stat_logger.record(
                scheduler_stats, iteration_stats, mm_cache_stats, engine_idx=engine_idx or 0
            )

    def log(self) -> None:
        """Let every logger write what it writes periodically."""
        for stat_logger in self.stat_loggers:
            stat_logger.log()

    def log_engine_initialized(self) -> None:
        """Tell every logger that the KV cache has its size."""
        for stat_logger in self.stat_loggers:
            stat_logger.log_engine_initialized()
