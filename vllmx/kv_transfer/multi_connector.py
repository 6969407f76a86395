# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/v1/multi_connector.py @ v0.25.0
"""Several connectors as one: all of them save, and the first that has a prompt loads it."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllmx.config import KVTransferConfig
from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllmx.kv_transfer.factory import KVConnectorFactory
from vllmx.kv_transfer.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllmx.kv_transfer.multi_metrics import MultiKVConnectorPromMetrics, MultiKVConnectorStats

if TYPE_CHECKING:
    from torch import Tensor

    from vllmx.config import VllmConfig
    from vllmx.core.block_pool import BlockPool
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_cache_manager import KVCacheBlocks
    from vllmx.core.kv_events import KVCacheEvent
    from vllmx.core.output import KVConnectorOutput, SchedulerOutput
    from vllmx.forward_context import ForwardContext
    from vllmx.kv_transfer.base import CopyBlocksOp
    from vllmx.request import Request

logger = logging.getLogger(__name__)

Finished = tuple[bool, dict[str, Any] | None]


@dataclass
class MultiKVConnectorMetadata(KVConnectorMetadata):
    """What each connector's worker is told, in their order."""

    metadata: tuple[KVConnectorMetadata, ...]
    extra_async_saves: dict[str, int] | None = None
    """Request id -> connectors after the first one that still send its blocks."""


@dataclass
class MultiKVConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """What each connector's worker tells, in their order."""

    metadata: tuple[KVConnectorWorkerMetadata | None, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This and another worker's, connector by connector."""
        assert isinstance(other, MultiKVConnectorWorkerMetadata)
        return MultiKVConnectorWorkerMetadata(
            tuple(
                a.aggregate(b) if a is not None and b is not None else (b if a is None else a)
                for a, b in zip(self.metadata, other.metadata, strict=True)
            )
        )


class MultiConnector(KVConnectorBase_V1, SupportsHMA):
    """`kv_connector_extra_config.connectors` lists the configs of the connectors, in the order in
    which they are asked for a prompt. Entries are saved to all of them."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        children = self._get_connector_classes_and_configs(vllm_config)
        self._connectors = [make(config, role, kv_cache_config) for make, config in children]
        self._ktc_kv_transfer_config = [config.kv_transfer_config for _, config in children]
        self._all_support_hma = self.all_children_support_hma(self._kv_transfer_config)
        # Request id -> the connector that loads it.
        self._requests_to_connector: dict[str, int] = {}
        # Request id -> connectors after the first one that still send its blocks; counted at the
        # scheduler, used up at the worker.
        self._extra_async_saves: dict[str, int] = {}

    @classmethod
    def _child_configs(cls, transfer: KVTransferConfig) -> list[KVTransferConfig]:
        children = transfer.kv_connector_extra_config.get("connectors")
        if not children:
            raise UserError(
                "MultiConnector: list the connectors' own configs in "
                "kv_transfer.kv_connector_extra_config.connectors."
            )
        return [KVTransferConfig(**{"engine_id": transfer.engine_id, **ktc}) for ktc in children]

    @classmethod
    def _get_connector_classes_and_configs(
        cls, vllm_config: VllmConfig
    ) -> list[tuple[type[KVConnectorBase_V1], VllmConfig]]:
        """Each connector's class, and the engine's config with the connector's own in it."""
        assert vllm_config.kv_transfer_config is not None
        children = []
        for transfer in cls._child_configs(vllm_config.kv_transfer_config):
            config = copy.copy(vllm_config)
            config.kv_transfer_config = transfer
            children.append((KVConnectorFactory.get_connector_class(transfer), config))
        return children

    @classmethod
    def all_children_support_hma(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Whether each of the connectors serves several KV groups; False without any."""
        if not kv_transfer_config.kv_connector_extra_config.get("connectors"):
            return False
        return all(
            KVConnectorFactory.supports_hma_config(child)
            for child in cls._child_configs(kv_transfer_config)
        )

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether each of them prefers it."""
        return bool(self._connectors) and all(c.prefer_cross_layer_blocks for c in self._connectors)

    def shutdown(self) -> None:
        """Shut each of them down; the last error is raised once all have had their turn."""
        failure: Exception | None = None
        for connector in self._connectors:
            try:
                connector.shutdown()
            except Exception as error:
                logger.exception("Shutdown of %s failed", type(connector).__name__)
                failure = error
        if failure is not None:
            raise failure

    # ------------------------------------------------------------------ worker's side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Give each connector its part."""
        assert isinstance(connector_metadata, MultiKVConnectorMetadata)
        self._extra_async_saves.update(connector_metadata.extra_async_saves or {})
        for connector, metadata in zip(self._connectors, connector_metadata.metadata, strict=True):
            connector.bind_connector_metadata(metadata)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        for connector in self._connectors:
            connector.clear_connector_metadata()
        super().clear_connector_metadata()

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.register_kv_caches(kv_caches)

    def register_cross_layers_kv_cache(self, kv_cache: Tensor, attn_backend: Any) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.register_cross_layers_kv_cache(kv_cache, attn_backend)

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.set_host_xfer_buffer_ops(copy_operation)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Give each connector its part."""
        assert isinstance(kv_connector_metadata, MultiKVConnectorMetadata)
        for connector, metadata in zip(
            self._connectors, kv_connector_metadata.metadata, strict=True
        ):
            connector.handle_preemptions(metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Each begins with what it has to load."""
        for connector in self._connectors:
            connector.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait for each of them."""
        for connector in self._connectors:
            connector.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Each begins to save."""
        for connector in self._connectors:
            connector.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Wait for each of them."""
        for connector in self._connectors:
            connector.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """A request is sent once every connector that sends it is done."""
        all_sent: set[str] = set()
        all_received: set[str] = set()
        for connector in self._connectors:
            sent, received = connector.get_finished(finished_req_ids)
            all_received.update(received or ())
            for req_id in sent or ():
                others = self._extra_async_saves.pop(req_id, 0)
                if others == 0:
                    all_sent.add(req_id)
                elif others > 1:
                    self._extra_async_saves[req_id] = others - 1
        return all_sent or None, all_received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Those of all of them."""
        failed: set[int] = set()
        for connector in self._connectors:
            failed |= connector.get_block_ids_with_load_errors()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What each of them tells; None if none does."""
        metadata = tuple(c.build_connector_worker_meta() for c in self._connectors)
        if all(part is None for part in metadata):
            return None
        return MultiKVConnectorWorkerMetadata(metadata)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """That of the first connector that has any."""
        for connector in self._connectors:
            metadata = connector.get_handshake_metadata()
            if metadata is not None:
                return metadata
        return None

    # ------------------------------------------------------------------ scheduler's side

    def get_finished_count(self) -> int | None:
        """The most workers that any of them waits for; None: all."""
        counts = [c.get_finished_count() for c in self._connectors]
        return max((count for count in counts if count is not None), default=None)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.bind_gpu_block_pool(gpu_block_pool)

    def on_new_request(self, request: Request) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the first connector that has any of it offers; None while one does not know.

        All of them are asked, as some prepare for what is to be saved.
        """
        chosen: tuple[int, bool] = (0, False)
        self._requests_to_connector.pop(request.request_id, None)
        for i, connector in enumerate(self._connectors):
            num_tokens, load_async = connector.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
            if num_tokens is None:
                return None, False
            if chosen[0] == 0 and num_tokens > 0:
                self._requests_to_connector[request.request_id] = i
                chosen = (num_tokens, load_async)
        return chosen

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The chosen connector gets the blocks, the others none."""
        chosen = self._requests_to_connector.get(request.request_id)
        nothing = blocks.new_empty()
        for i, connector in enumerate(self._connectors):
            if i == chosen:
                connector.update_state_after_alloc(request, blocks, num_external_tokens)
            else:
                connector.update_state_after_alloc(request, nothing, 0)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What each connector's worker is to do."""
        metadata = MultiKVConnectorMetadata(
            tuple(c.build_connector_meta(scheduler_output) for c in self._connectors)
        )
        if self._extra_async_saves:
            metadata.extra_async_saves, self._extra_async_saves = self._extra_async_saves, {}
        return metadata

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Each gets the report with the part that its own worker wrote."""
        whole = connector_output.kv_connector_worker_meta
        assert whole is None or isinstance(whole, MultiKVConnectorWorkerMetadata)
        try:
            for i, connector in enumerate(self._connectors):
                part = whole.metadata[i] if whole is not None else None
                connector_output.kv_connector_worker_meta = part
                connector.update_connector_output(connector_output)
        finally:
            connector_output.kv_connector_worker_meta = whole

    def request_finished(self, request: Request, block_ids: list[int]) -> Finished:
        """Tell each of them; see `_all_finished`."""
        return self._all_finished(request, lambda c: c.request_finished(request, block_ids))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> Finished:
        """The same for a cache of several groups, which each connector must support."""
        if not self._all_support_hma:
            assert len(block_ids) == 1, "a connector does not support HMA, but there are groups"
            return self.request_finished(request, block_ids[0])
        return self._all_finished(
            request, lambda c: cast(SupportsHMA, c).request_finished_all_groups(request, block_ids)
        )

    def _all_finished(
        self, request: Request, finished: Callable[[KVConnectorBase_V1], Finished]
    ) -> Finished:
        """The blocks stay until every connector that keeps them is done; the parameters of all
        are one, and two of the same name are an error."""
        num_keeping = 0
        all_params: dict[str, Any] | None = None
        for connector in self._connectors:
            keeps_blocks, params = finished(connector)
            num_keeping += keeps_blocks
            if params is None:
                continue
            clashes = (all_params or {}).keys() & params.keys()
            if clashes:
                raise RuntimeError(
                    f"Several connectors give kv_transfer_params of the same name: {clashes}"
                )
            all_params = {**(all_params or {}), **params}
        if num_keeping > 1:
            self._extra_async_saves[request.request_id] = num_keeping - 1
        self._requests_to_connector.pop(request.request_id, None)
        return num_keeping > 0, all_params

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What happened to each of their caches."""
        for connector in self._connectors:
            yield from connector.take_events()

    def has_pending_push_work(self) -> bool:
        """Whether any of them has."""
        return any(connector.has_pending_push_work() for connector in self._connectors)

    def reset_cache(self) -> bool:
        """Empty each of their caches; False if one of them failed."""
        results = [connector.reset_cache() is not False for connector in self._connectors]
        return all(results)

    def get_kv_connector_stats(self) -> MultiKVConnectorStats | None:
        """What they counted, by class name; None if none keeps statistics."""
        result: MultiKVConnectorStats | None = None
        for connector in self._connectors:
            stats = connector.get_kv_connector_stats()
            if stats is not None:
                result = result or MultiKVConnectorStats()
                result.add(type(connector).__name__, stats)
        return result

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Tell each of them."""
        for connector in self._connectors:
            connector.set_xfer_handshake_metadata_pp_aware(metadata)

    # ------------------------------------------------------------------ of the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether any of them does."""
        children = [KVTransferConfig(**ktc) for ktc in extra_config.get("connectors", ())]
        return any(
            KVConnectorFactory.get_connector_class(child).requires_piecewise_for_cudagraph(
                child.kv_connector_extra_config
            )
            for child in children
        )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout that they need; ValueError if they need different ones."""
        needed = {
            layout
            for child, config in cls._get_connector_classes_and_configs(vllm_config)
            if (layout := child.get_required_kvcache_layout(config)) is not None
        }
        if len(needed) > 1:
            raise ValueError(
                f"The connectors need different KV cache layouts: {', '.join(sorted(needed))}."
            )
        return next(iter(needed), None)

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Statistics from what came from another process: {class name: {"data": ...}}.

        Those of connectors that build none are left out.
        """
        result = MultiKVConnectorStats()
        for name, value in (data or {}).items():
            if isinstance(value, KVConnectorStats):
                result[name] = value
                continue
            connector_cls = KVConnectorFactory.get_connector_class_by_name(name)
            assert isinstance(value, dict) and "data" in value, (
                f"Expected a dict with a 'data' field, got {value}"
            )
            stats = connector_cls.build_kv_connector_stats(data=value["data"])
            if stats is not None:
                result[name] = stats
        return result

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """The metrics of each class among them that has its own."""
        made: dict[str, KVConnectorPromMetrics] = {}
        children = cls._get_connector_classes_and_configs(vllm_config)
        for child, config in {
            child.__name__: (child, config) for child, config in children
        }.values():
            metrics = child.build_prom_metrics(
                config, metric_types, labelnames, per_engine_labelvalues
            )
            if metrics is not None:
                made[child.__name__] = metrics
        return MultiKVConnectorPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, made
        )
