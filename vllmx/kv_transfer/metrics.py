# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/v1/metrics.py @ v0.25.0
"""What connectors count, on its way to the log and to /metrics."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram

from vllmx.kv_transfer.factory import KVConnectorFactory

if TYPE_CHECKING:
    from vllmx.config import KVTransferConfig, VllmConfig
    from vllmx.kv_transfer.base import KVConnectorBase_V1

logger = logging.getLogger(__name__)


@dataclass
class KVConnectorStats(ABC):
    """Base of a connector's statistics; `data` must be serializable."""

    data: dict[str, Any] = field(default_factory=dict)
    """What was counted or observed."""

    @abstractmethod
    def reset(self) -> None:
        """Begin anew."""

    @abstractmethod
    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and `other` as one; may change and return this object."""

    @abstractmethod
    def reduce(self) -> dict[str, int | float]:
        """A few numbers that stand for the whole, for the log."""

    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing was counted."""


class KVConnectorLogging:
    """Gathers a connector's statistics and writes them to the log now and then."""

    def __init__(self, kv_transfer_config: KVTransferConfig | None) -> None:
        self.connector_cls: type[KVConnectorBase_V1] | None = None
        if kv_transfer_config is not None and kv_transfer_config.kv_connector:
            self.connector_cls = KVConnectorFactory.get_connector_class(kv_transfer_config)
        self._warned = False
        self.reset()

    def reset(self) -> None:
        """Forget what was gathered."""
        self.transfer_stats_accumulator: KVConnectorStats | None = None

    def observe(self, transfer_stats_data: dict[str, Any]) -> None:
        """Add the `data` of a step's statistics."""
        assert self.connector_cls is not None, "there is no connector to have statistics of"
        stats = self.connector_cls.build_kv_connector_stats(transfer_stats_data)
        if stats is None:
            if not self._warned:
                logger.warning(
                    "%s keeps statistics but has no build_kv_connector_stats: they are not logged.",
                    self.connector_cls.__name__,
                )
            self._warned = True
        elif self.transfer_stats_accumulator is None:
            self.transfer_stats_accumulator = stats
        else:
            self.transfer_stats_accumulator = self.transfer_stats_accumulator.aggregate(stats)

    def log(self, log_fn: Callable[..., None] = logger.info) -> None:
        """Write what was gathered since the last call, if anything was."""
        stats = self.transfer_stats_accumulator
        if stats is None or stats.is_empty():
            return
        log_fn("KV Transfer metrics: %s", ", ".join(f"{k}={v}" for k, v in stats.reduce().items()))
        self.reset()


class KVConnectorPromMetrics(ABC):
    """Base of a connector's own metrics of /metrics; a subclass creates them and sets them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """`metric_types`: what to call for prometheus_client's Gauge, Counter and Histogram, which
        puts the metric into the engine's registry; label values are given by engine."""
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._gauge_cls = metric_types[Gauge]
        self._counter_cls = metric_types[Counter]
        self._histogram_cls = metric_types[Histogram]
        self._labelnames = labelnames
        self.per_engine_labelvalues = per_engine_labelvalues

    @abstractmethod
    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the `data` of a step's statistics."""


class KVConnectorProm:
    """The configured connector's own metrics, if it has any."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self.prom_metrics: KVConnectorPromMetrics | None = None
        transfer = vllm_config.kv_transfer_config
        if transfer is not None and transfer.kv_connector:
            connector_cls = KVConnectorFactory.get_connector_class(transfer)
            self.prom_metrics = connector_cls.build_prom_metrics(
                vllm_config, metric_types, labelnames, per_engine_labelvalues
            )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the `data` of a step's statistics."""
        if self.prom_metrics is not None:
            self.prom_metrics.observe(transfer_stats_data, engine_idx)
