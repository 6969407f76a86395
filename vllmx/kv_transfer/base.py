# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/kv_transfer/kv_connector/v1/base.py @ v0.25.0
"""What a KV connector is. Each engine has it twice: once at the scheduler, once at the worker.

Scheduler's side: `get_num_new_matched_tokens` says how much of a prompt can be brought,
`update_state_after_alloc` which blocks it goes to, `build_connector_meta` tells the workers what
to do in a step, `request_finished` may keep an ended request's blocks until they are sent.

Worker's side, in the order of a step: `handle_preemptions`, `bind_connector_metadata`,
`start_load_kv`; for each layer `wait_for_layer_load` before and `save_kv_layer` after its
attention; `wait_for_save`, `get_finished` and the other reports; `clear_connector_metadata`.
"""

from __future__ import annotations

import enum
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from vllmx.config import VllmConfig
    from vllmx.core.block_pool import BlockPool
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_cache_manager import KVCacheBlocks
    from vllmx.core.kv_events import KVCacheEvent, KVConnectorKVEvents
    from vllmx.core.output import KVConnectorOutput, SchedulerOutput
    from vllmx.forward_context import ForwardContext
    from vllmx.kv_transfer.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllmx.request import Request

    CopyBlocksOp = Callable[
        [dict[str, Tensor], dict[str, Tensor], list[int], list[int], Literal["h2d", "d2h"]], None
    ]

logger = logging.getLogger(__name__)


class KVConnectorRole(enum.Enum):
    """Which side of the engine a connector object serves."""

    SCHEDULER = 0
    """Beside the scheduler: it decides."""
    WORKER = 1
    """Beside the model: it moves data."""


class KVConnectorMetadata(ABC):  # noqa: B024
    """Base of what a scheduler's connector tells the workers' for one step."""


class KVConnectorHandshakeMetadata(ABC):  # noqa: B024
    """Base of what workers of two engines must know of each other; can be serialized."""


class KVConnectorWorkerMetadata(ABC):
    """Base of what a worker's connector tells the scheduler's after a step."""

    @abstractmethod
    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """This and what another worker tells of the same step as one."""


class SupportsHMA(ABC):
    """For connectors that can serve a KV cache with several groups.

    Without it the engine keeps all layers in one group, at the cost of memory where some of them
    have a window.
    """

    @abstractmethod
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """`request_finished` with a list of block ids for each group, called in its place."""


def supports_hma(connector: Any) -> bool:
    """Whether a connector, or a class of connectors, serves several KV groups."""
    if isinstance(connector, type):
        return issubclass(connector, SupportsHMA)
    return isinstance(connector, SupportsHMA)


class KVConnectorBase_V1(ABC):
    """Base of all connectors; what a connector has no use for it inherits."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        if vllm_config.kv_transfer_config is None:
            raise ValueError("kv_transfer_config must be set for KVConnectorBase_V1")
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config
        self._role = role
        self._connector_metadata: KVConnectorMetadata | None = None

    @property
    def role(self) -> KVConnectorRole:
        """Which side this object serves."""
        return self._role

    @property
    def prefer_cross_layer_blocks(self) -> bool:
        """Whether one tensor with the blocks of all layers would suit it better."""
        return False

    def shutdown(self) -> None:  # noqa: B027
        """Finish what is under way and let go of resources."""

    # ------------------------------------------------------------------ worker's side

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take in what is to be done in the step that begins."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """The step is over."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> KVConnectorMetadata:
        """What is to be done in this step; for subclasses."""
        assert self._connector_metadata is not None, "no step is running"
        return self._connector_metadata

    def has_connector_metadata(self) -> bool:
        """Whether a step is running."""
        return self._connector_metadata is not None

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:  # noqa: B027
        """Learn where each layer's cache is, once it is allocated; shapes are the backend's."""

    def register_cross_layers_kv_cache(  # noqa: B027
        self, kv_cache: Tensor, attn_backend: Any
    ) -> None:
        """Learn where the one cache of all layers is, in place of `register_kv_caches`."""

    def set_host_xfer_buffer_ops(self, copy_operation: CopyBlocksOp) -> None:  # noqa: B027
        """Learn how blocks are copied between host and device."""

    def handle_preemptions(  # noqa: B027
        self, kv_connector_metadata: KVConnectorMetadata
    ) -> None:
        """Rescue what is being saved from blocks that this step is going to overwrite."""

    @abstractmethod
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin to load all layers' entries of this step; it may go on during the forward pass."""

    @abstractmethod
    def wait_for_layer_load(self, layer_name: str) -> None:
        """Wait until what a layer is about to read is there."""

    @abstractmethod
    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Begin to save a layer's entries; `kv_layer` is its whole cache."""

    @abstractmethod
    def wait_for_save(self) -> None:
        """Wait until the entries of this step may be overwritten."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """(requests whose blocks are all sent, requests whose load has ended) since the last call.

        `finished_req_ids` have ended; only of those, or earlier ones, blocks can be sent. A load
        that failed has ended too.
        """
        return None, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks whose load failed since the last call.

        Of a load in the background they must be told no later than its end.
        """
        return set()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What was counted since the last call; asked on both sides."""
        return None

    def get_kv_connector_kv_cache_events(self) -> KVConnectorKVEvents | None:
        """What happened to the connector's own cache since the last call."""
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's side is to know of this step."""
        return None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """What workers of other engines need to know of this one."""
        return None

    # ------------------------------------------------------------------ scheduler's side

    @abstractmethod
    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens after the first `num_computed_tokens` can be brought, and whether that
        goes on in the background over several steps (False with 0 tokens).

        None tokens: not known yet, ask again later. It may be asked several times for a request,
        and asking changes nothing.
        """

    @abstractmethod
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request got `blocks`, of which `num_external_tokens` tokens are to be brought.

        After a load in the background it is called again, with 0 tokens, when the request runs.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """What the workers are to do in this step. It must leave `scheduler_output` as it is."""

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:  # noqa: B027
        """Learn of the pool, for connectors that look at blocks' reference counts."""

    def on_new_request(self, request: Request) -> None:  # noqa: B027
        """A request has been added."""

    def update_connector_output(  # noqa: B027
        self, connector_output: KVConnectorOutput
    ) -> None:
        """Take in what the workers reported of a step."""

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended: (whether its blocks stay until `get_finished` reports it as
        sent, parameters that the caller gets for a transfer). Called once a request."""
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What happened to the connector's own cache since the last call."""
        return ()

    def has_pending_push_work(self) -> bool:
        """Whether steps must go on, although no request is left, because something is sent."""
        return False

    def reset_cache(self) -> bool | None:
        """Empty the connector's cache: False if that failed, None if it has none to empty."""
        logger.debug("%s has no reset_cache", type(self).__name__)
        return None

    def get_finished_count(self) -> int | None:
        """How many workers must report a transfer before it has ended; None: all."""
        return None

    def set_xfer_handshake_metadata(  # noqa: B027
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """Take in what each tensor-parallel rank's `get_handshake_metadata` gave."""

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The same by (pipeline rank, tensor-parallel rank); ValueError for several stages."""
        if any(pp_rank != 0 for pp_rank, _ in metadata):
            raise ValueError(f"{type(self).__name__} can't serve an engine with pipeline stages.")
        self.set_xfer_handshake_metadata({rank: data for (_, rank), data in metadata.items()})

    # ------------------------------------------------------------------ of the class

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The order of a cache's dimensions that it needs, NHD or HND; None: any."""
        if cls is KVConnectorBase_V1:
            raise TypeError(
                "get_required_kvcache_layout should not be called on the abstract base class"
            )
        return None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Whether it works between layers, which a graph of the whole model would leave out."""
        return False

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """The statistics whose `data` was sent from elsewhere; None: it keeps none."""
        return None

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        """Register its own metrics of /metrics; None: it has none."""
        return None
