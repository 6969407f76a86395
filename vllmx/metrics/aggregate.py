# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/metrics/loggers.py @ v0.25.0
"""Receivers of the statistics of all engines of a front end, and those of one engine among them."""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from vllmx.config import VllmConfig
from vllmx.metrics.loggers import LoggingStatLogger, StatLoggerBase, StatLoggerFactory
from vllmx.metrics.stats import IterationStats, SchedulerStats

logger = logging.getLogger(__name__)


class AggregateStatLoggerBase(StatLoggerBase):
    """A receiver that is made once for all engines; a subclass may be given as `stat_loggers`."""

    @abstractmethod
    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None: ...


class PerEngineStatLoggerAdapter(AggregateStatLoggerBase):
    """Holds one receiver for each engine and gives it what its engine did."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        engine_indexes: list[int],
        per_engine_stat_logger_factory: StatLoggerFactory,
    ) -> None:
        self.engine_indexes = engine_indexes
        self.per_engine_stat_loggers = {
            index: per_engine_stat_logger_factory(vllm_config, index) for index in engine_indexes
        }

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Pass on to the receiver of engine `engine_idx`."""
        self.per_engine_stat_loggers[engine_idx].record(
            scheduler_stats, iteration_stats, mm_cache_stats, engine_idx
        )

    def log(self) -> None:
        """Let every engine's receiver write its line."""
        for stat_logger in self.per_engine_stat_loggers.values():
            stat_logger.log()

    def log_engine_initialized(self) -> None:
        """Tell every engine's receiver."""
        for stat_logger in self.per_engine_stat_loggers.values():
            stat_logger.log_engine_initialized()


class AggregatedLoggingStatLogger(LoggingStatLogger, AggregateStatLoggerBase):
    """One line in the log for all engines: sums, and the mean of the caches' usage."""

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int]) -> None:
        LoggingStatLogger.__init__(self, vllm_config, engine_indexes[0])
        self.engine_indexes = engine_indexes
        self.last_scheduler_stats_dict = {index: SchedulerStats() for index in engine_indexes}

    @property
    def log_prefix(self) -> str:
        """Begin of the line."""
        return f"{len(self.engine_indexes)} engines together: "

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any | None = None,
        engine_idx: int = 0,
    ) -> None:
        """Add up tokens since the last line; keep each engine's newest scheduler state."""
        LoggingStatLogger.record(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
        if scheduler_stats is not None:
            self.last_scheduler_stats_dict[engine_idx] = scheduler_stats

    def aggregate_scheduler_stats(self) -> None:
        """Make `last_scheduler_stats` the state of all engines."""
        known = self.last_scheduler_stats_dict.values()
        self.last_scheduler_stats = SchedulerStats(
            num_running_reqs=sum(stats.num_running_reqs for stats in known),
            num_waiting_reqs=sum(stats.num_waiting_reqs for stats in known),
            num_skipped_waiting_reqs=sum(stats.num_skipped_waiting_reqs for stats in known),
            kv_cache_usage=sum(stats.kv_cache_usage for stats in known) / len(known),
        )

    def log(self) -> None:
        """Write the line: at level INFO, or DEBUG when nothing happened twice in a row."""
        self.aggregate_scheduler_stats()
        LoggingStatLogger.log(self)
