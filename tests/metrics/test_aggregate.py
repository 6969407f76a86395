# SPDX-License-Identifier: Apache-2.0
"""Receivers of statistics: one for each engine, or one for all of them."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from vllmx.config import VllmConfig
from vllmx.metrics.aggregate import (
    AggregatedLoggingStatLogger,
    AggregateStatLoggerBase,
    PerEngineStatLoggerAdapter,
)
from vllmx.metrics.loggers import LoggingStatLogger, PrometheusStatLogger, StatLoggerManager
from vllmx.metrics.stats import SchedulerStats


@pytest.fixture
def config() -> VllmConfig:
    made = VllmConfig()
    made.model_config.served_model_name = ["m"]
    made.model_config.max_model_len = 16
    return made


class Spy(LoggingStatLogger):
    """Notes what it is told, and by which engine."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        super().__init__(vllm_config, engine_index)
        self.seen: list[Any] = []

    def record(self, *args: Any, **kwargs: Any) -> None:
        self.seen.append("record")

    def log(self) -> None:
        self.seen.append("log")

    def log_engine_initialized(self) -> None:
        self.seen.append("initialized")


class GlobalSpy(AggregatedLoggingStatLogger):
    """The same for all engines."""

    log_calls = 0

    def log(self) -> None:
        self.log_calls += 1


def test_own_receivers_come_first_each_in_its_shape(config: VllmConfig) -> None:
    manager = StatLoggerManager(config, [0], custom_stat_loggers=[Spy, GlobalSpy])
    manager.log_engine_initialized()
    manager.record(SchedulerStats(), None)
    manager.log()
    per_engine, global_spy = manager.stat_loggers[:2]
    assert isinstance(per_engine, PerEngineStatLoggerAdapter)
    assert isinstance(global_spy, GlobalSpy) and isinstance(global_spy, AggregateStatLoggerBase)
    assert per_engine.per_engine_stat_loggers[0].seen == ["initialized", "record", "log"]
    assert global_spy.log_calls == 1
    assert isinstance(manager.stat_loggers[-1], PrometheusStatLogger)


def test_each_engine_has_a_receiver_of_its_own(config: VllmConfig) -> None:
    adapter = PerEngineStatLoggerAdapter(config, [0, 1], Spy)
    adapter.record(SchedulerStats(), None, engine_idx=1)
    assert [spy.seen for spy in adapter.per_engine_stat_loggers.values()] == [[], ["record"]]
    assert adapter.per_engine_stat_loggers[1].engine_index == 1


def test_line_for_all_engines_has_sums_and_the_mean_usage(
    config: VllmConfig, caplog: pytest.LogCaptureFixture
) -> None:
    together = AggregatedLoggingStatLogger(config, [0, 1])
    for index, running, waiting, usage in ((0, 1, 9, 0.9), (0, 2, 3, 0.5), (1, 4, 1, 0.25)):
        stats = SchedulerStats(
            num_running_reqs=running, num_waiting_reqs=waiting, kv_cache_usage=usage
        )
        together.record(stats, None, engine_idx=index)
    with caplog.at_level(logging.DEBUG, logger="vllmx"):
        together.log()
    line = caplog.records[-1].getMessage()
    assert line.startswith("2 engines together: Avg prompt throughput")
    assert "Running: 6 reqs, Waiting: 4 reqs" in line
    assert "GPU KV cache usage: 37.5%" in line
