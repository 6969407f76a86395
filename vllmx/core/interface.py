# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/interface.py @ v0.25.0
"""What the engine core asks of a scheduler; `scheduler.scheduler_cls` may name another one."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_event_publisher import EventPublisher
    from vllmx.core.output import (
        DraftTokenIds,
        GrammarOutput,
        ModelRunnerOutput,
        SchedulerOutput,
    )
    from vllmx.engine import EngineCoreOutputs
    from vllmx.kv_transfer.base import KVConnectorBase_V1
    from vllmx.metrics.stats import SchedulerStats
    from vllmx.request import Request, RequestStatus


class PauseState(enum.IntEnum):
    """What a paused scheduler still schedules."""

    UNPAUSED = 0
    """Everything."""
    PAUSED_NEW = 1
    """Running requests, but no waiting one."""
    PAUSED_ALL = 2
    """Nothing."""


class SchedulerInterface(ABC):
    """Decides what each step computes, and digests what came of it."""

    kv_event_publisher: EventPublisher
    """Where events of the prefix cache go, if they are enabled."""

    @abstractmethod
    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: Any | None,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: Any | None = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None: ...

    @abstractmethod
    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose the requests of the next step and how many tokens each of them computes.

        `throttle_prefills`: prompts had better wait for another step, as those of other ranks do.
        One call is one forward pass. Finished and preempted requests are reported in the first
        output after the fact, so that the runner can drop them.
        """

    @abstractmethod
    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens of the constrained requests in `scheduler_output`, None without any."""

    @abstractmethod
    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in the drafts for the next step."""

    @abstractmethod
    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put drafts into a step that was scheduled with placeholders for them."""

    @abstractmethod
    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the tokens of a step, end the requests that stop, and return by client index
        what is to be told. Results of requests that ended meanwhile are dropped."""

    @abstractmethod
    def add_request(self, request: Request) -> None:
        """Queue a new request."""

    @abstractmethod
    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside (None: all). Unknown and finished ids are ignored.

        Returns the (request id, client index) of those that were alive.
        """

    @abstractmethod
    def get_num_unfinished_requests(self) -> int:
        """Requests that could still be scheduled in the present pause state."""

    def has_unfinished_requests(self) -> bool:
        """Whether any request could still be scheduled."""
        return self.get_num_unfinished_requests() > 0

    @abstractmethod
    def has_finished_requests(self) -> bool:
        """Whether the runner has yet to hear of requests that ended."""

    def has_requests(self) -> bool:
        """Whether a step is due: to compute, or to tell the runner who ended."""
        return self.has_unfinished_requests() or self.has_finished_requests()

    @property
    @abstractmethod
    def pause_state(self) -> PauseState:
        """What is paused now."""

    @abstractmethod
    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""

    @abstractmethod
    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks.

        With `reset_running_requests` those are preempted and computed anew.
        """

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler's side of the KV connector, if there is one."""
        return None

    @abstractmethod
    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""

    @abstractmethod
    def make_stats(self) -> SchedulerStats | None:
        """State for the loggers, None where statistics are off."""

    @abstractmethod
    def shutdown(self) -> None:
        """Let go of what the scheduler holds."""
