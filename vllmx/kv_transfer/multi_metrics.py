# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py @ v0.25.0
"""What several connectors count, kept apart by class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllmx.kv_transfer.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllmx.config import VllmConfig


@dataclass
class MultiKVConnectorStats(KVConnectorStats):
    """Statistics by the connector's class name."""

    def __getitem__(self, connector_id: str) -> KVConnectorStats:
        return self.data[connector_id]

    def __setitem__(self, connector_id: str, stats: KVConnectorStats) -> None:
        self.data[connector_id] = stats

    def add(self, connector_id: str, stats: KVConnectorStats) -> None:
        """Count `stats` to what `connector_id` has so far."""
        known = self.data.get(connector_id)
        self.data[connector_id] = stats if known is None else known.aggregate(stats)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """These and `other` as one."""
        for connector_id, stats in other.data.items():
            self.add(connector_id, stats)
        return self

    def reset(self) -> None:
        """Begin anew with every connector."""
        for stats in self.data.values():
            stats.reset()

    def reduce(self) -> dict[str, Any]:
        """Each connector's numbers for the log."""
        return {connector_id: stats.reduce() for connector_id, stats in self.data.items()}

    def is_empty(self) -> bool:
        """Whether no connector counted anything."""
        return all(stats.is_empty() for stats in self.data.values())


class MultiKVConnectorPromMetrics(KVConnectorPromMetrics):
    """The metrics of each connector that has its own, by class name."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        prom_metrics: dict[str, KVConnectorPromMetrics],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._prom_metrics = prom_metrics

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Hand each connector's statistics to its metrics."""
        for connector_id, stats in transfer_stats_data.items():
            assert connector_id in self._prom_metrics, (
                f"{connector_id} has statistics but no Prometheus metrics; those that have are "
                f"{', '.join(self._prom_metrics) or 'none'}"
            )
            data = stats.data if isinstance(stats, KVConnectorStats) else stats["data"]
            self._prom_metrics[connector_id].observe(data, engine_idx)
