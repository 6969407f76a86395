# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/distributed/ec_transfer/ec_connector/base.py @ v0.25.0
"""What an encoder-cache connector does: it carries encoder outputs between engines.

It has two halves. The scheduler's half says which outputs can be had elsewhere and writes down, for
each step, which are to be fetched. The worker's half fetches and saves them. One class serves for
both; `role` says which it is.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.output import ECConnectorOutput, SchedulerOutput
    from vllmx.request import Request


class ECConnectorRole(enum.Enum):
    """Which half of a connector an object is."""

    SCHEDULER = 0
    WORKER = 1


class ECConnectorMetadata(ABC):  # noqa: B024 - each connector has fields of its own
    """What the scheduler's half tells the worker's half of one step."""


class ECConnectorBase(ABC):
    """A connector, to be subclassed; `ec_transfer_config` says what the engine does with it."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        config = vllm_config.ec_transfer_config
        if config is None:
            raise ValueError("ec_transfer_config must be set for ECConnectorBase")
        self._vllm_config = vllm_config
        self._role = role
        self._is_producer = config.is_ec_producer
        self._is_consumer = config.is_ec_consumer
        self._connector_metadata: ECConnectorMetadata | None = None

    @property
    def role(self) -> ECConnectorRole:
        """Which half this is."""
        return self._role

    @property
    def is_producer(self) -> bool:
        """Whether the engine saves the outputs it computes."""
        return self._is_producer

    @property
    def is_consumer(self) -> bool:
        """Whether the engine takes outputs that others have computed."""
        return self._is_consumer

    def shutdown(self) -> None:  # noqa: B027
        """End transfers that are under way and let go of what is held."""

    # ------------------------------------------------------------------ the scheduler's half

    @abstractmethod
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the output called `identifier` can be had elsewhere now."""

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        """Whether the request can go on; False: outputs for it are on their way, ask again.

        May start to fetch those of its items that end after token `num_computed_tokens`.
        """
        return True

    @abstractmethod
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """Item `index` of the request has its place in the cache; note it if it is to be fetched.

        Called for items that will be encoded here too.
        """

    @abstractmethod
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        """What the worker's half needs for this step, which is forgotten here thereby.

        `scheduler_output` must stay as it is.
        """

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:  # noqa: B027
        """Take in what the worker's half reports of its transfers."""

    # ------------------------------------------------------------------ the worker's half

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        """Before a step runs: what the scheduler's half has written for it."""
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        """After a step has run."""
        self._connector_metadata = None

    def _get_connector_metadata(self) -> ECConnectorMetadata:
        assert self._connector_metadata is not None, "no step is bound"
        return self._connector_metadata

    def register_caches(self, ec_caches: dict[str, Any]) -> None:  # noqa: B027
        """Told of the worker's outputs once, by a worker that keeps them in fixed places."""

    @abstractmethod
    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Put the outputs that the bound step fetches into `encoder_cache`, by identifier."""

    @abstractmethod
    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Let others have the output `encoder_cache[mm_hash]`."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Told which requests ended; returns those whose outputs have been sent, and fetched, in
        the background."""
        return None, None
