# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/utils.py @ v0.25.0
"""Many workers, one output: what their KV connectors report as the scheduler wants it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.core.output import KVConnectorOutput, ModelRunnerOutput

if TYPE_CHECKING:
    from vllmx.kv_transfer.base import KVConnectorBase_V1


class KVOutputAggregator:
    """For an executor of several workers. A transfer has ended once enough workers have said so,
    which may be in different steps."""

    def __init__(self, expected_finished_count: int) -> None:
        """`expected_finished_count`: workers that must report a transfer."""
        self._expected_finished_count = expected_finished_count
        # Request id -> workers that have yet to report it.
        self._recv_remaining_count: dict[str, int] = {}
        self._send_remaining_count: dict[str, int] = {}

    @classmethod
    def from_connector(cls, connector: KVConnectorBase_V1, world_size: int) -> KVOutputAggregator:
        """An aggregator for the workers of a connector: `world_size` unless it says otherwise."""
        return cls(connector.get_finished_count() or world_size)

    def aggregate(
        self, outputs: Sequence[ModelRunnerOutput | None], output_rank: int = 0
    ) -> ModelRunnerOutput | None:
        """The output of worker `output_rank` with what all workers' connectors report of the same
        step; None if it has none."""
        output = outputs[output_rank]
        if output is None:
            return None
        merged = KVConnectorOutput()
        sent: set[str] = set()
        received: set[str] = set()
        for worker_output in outputs:
            assert worker_output is not None, "a worker has no output for a step that others ran"
            report = worker_output.kv_connector_output
            if report is None:
                continue
            if report.expected_finished_count > 0:
                self._expected_finished_count = report.expected_finished_count
            sent |= self._ended(report.finished_sending, self._send_remaining_count)
            received |= self._ended(report.finished_recving, self._recv_remaining_count)
            self._merge(merged, report)
        merged.finished_sending = sent or None
        merged.finished_recving = received or None
        merged.expected_finished_count = self._expected_finished_count
        output.kv_connector_output = merged
        return output

    def _ended(self, req_ids: Iterable[str] | None, remaining: dict[str, int]) -> set[str]:
        """Those of a worker's `req_ids` that no other worker has to report any more."""
        ended = set()
        for req_id in req_ids or ():
            left = remaining.pop(req_id, self._expected_finished_count) - 1
            if left == 0:
                ended.add(req_id)
            else:
                remaining[req_id] = left
        return ended

    @staticmethod
    def _merge(merged: KVConnectorOutput, report: KVConnectorOutput) -> None:
        merged.invalid_block_ids |= report.invalid_block_ids
        for name in ("kv_connector_stats", "kv_connector_worker_meta"):
            setattr(merged, name, _aggregate(getattr(merged, name), getattr(report, name)))
        if merged.kv_cache_events is None:
            merged.kv_cache_events = report.kv_cache_events
        elif report.kv_cache_events is not None:
            merged.kv_cache_events.merge(report.kv_cache_events)
            merged.kv_cache_events.increment_workers(1)


def _aggregate(first: Any, second: Any) -> Any:
    if first is None or second is None:
        return second if first is None else first
    return first.aggregate(second)
