# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""The scheduler's part in KV connectors: loads from outside, delayed and deferred frees.

A connector has KV entries somewhere else. It says how many of a request's tokens it can bring
(`_find_external`), and brings them either within the step that goes on from there, or in the
background: then the request holds its blocks and waits as WAITING_FOR_REMOTE_KVS until a worker
reports the transfer. When a request ends, the connector may keep the blocks until they are sent.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from vllmx.core.kv_load_failures import KVLoadFailures
from vllmx.core.output import KVConnectorOutput, ModelRunnerOutput, SchedulerOutput
from vllmx.core.schedule_step import Admission, CachedPrefix, ScheduleStep
from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import KVConnectorRole, SupportsHMA
from vllmx.kv_transfer.factory import KVConnectorFactory
from vllmx.metrics.stats import PrefixCacheStats
from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.config import SchedulerConfig, VllmConfig
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_cache_manager import KVCacheManager
    from vllmx.core.request_queue import RequestQueue
    from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorMetadata
    from vllmx.kv_transfer.metrics import KVConnectorStats

logger = logging.getLogger(__name__)


class KVConnectorScheduling(KVLoadFailures):
    """Mixed into the scheduler; nothing here runs in a step unless a connector is configured."""

    vllm_config: VllmConfig
    scheduler_config: SchedulerConfig
    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    block_size: int
    max_model_len: int
    log_stats: bool
    requests: dict[str, Request]
    waiting: RequestQueue
    skipped_waiting: RequestQueue
    running: list[Request]

    def _init_kv_connector(self) -> None:
        """Create the scheduler's side of the configured connector, if there is one."""
        self.connector: KVConnectorBase_V1 | None = None
        self.connector_prefix_cache_stats: PrefixCacheStats | None = None
        self._init_load_failures()
        self.finished_recving_kv_req_ids: set[str] = set()
        # Requests that hold blocks for a load but do not run yet.
        self._inflight_prefills: set[Request] = set()
        # Steps with tokens so far: scheduled, and taken in by update_from_output.
        self.defer_block_free = False
        self.sched_step_seq = 0
        self.processed_step_seq = 0
        # (step to wait for, blocks) in the order of the steps.
        self.deferred_frees: deque[tuple[int, list[KVCacheBlock]]] = deque()

        config = self.vllm_config.kv_transfer_config
        if config is None:
            return
        if self.vllm_config.model_config.is_encoder_decoder:
            raise UserError("kv_transfer: encoder-decoder models can't be used with KV connectors.")
        self.connector = KVConnectorFactory.create_connector(
            self.vllm_config, KVConnectorRole.SCHEDULER, self.kv_cache_config
        )
        self.connector.bind_gpu_block_pool(self.kv_cache_manager.block_pool)
        if self.log_stats:
            self.connector_prefix_cache_stats = PrefixCacheStats()
        self.recompute_kv_load_failures = config.kv_load_failure_policy == "recompute"
        # A load is not ordered against the writes of a step in flight, so blocks that such a step
        # may still write to must not be given to one.
        self.defer_block_free = (
            config.is_kv_consumer and self.vllm_config.max_concurrent_batches > 1
        )

    def get_kv_connector(self) -> KVConnectorBase_V1 | None:
        """The scheduler's side of the connector."""
        return self.connector

    # ------------------------------------------------------------------ admission

    def _may_load(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether the connector is asked for the tokens after `prefix`."""
        # What came already counts as its own; prompt log-probs need every token computed.
        return (
            prefix.num_own_tokens == 0
            and not request.skip_reading_prefix_cache
            and request.request_id not in self._unloadable_req_ids
        )

    def _find_external(self, request: Request, prefix: CachedPrefix) -> bool:
        """Add to `prefix` what the connector can bring; False if it does not know yet."""
        assert self.connector is not None
        if not self._may_load(request, prefix):
            return True
        num_tokens, load_async = self.connector.get_num_new_matched_tokens(
            request, prefix.num_local_tokens
        )
        if num_tokens is None:
            return False
        num_missing = request.num_tokens - prefix.num_local_tokens
        assert num_tokens <= num_missing, "the connector matched more tokens than there are"
        if num_tokens == num_missing and not load_async:
            num_tokens -= 1  # the logits of the last token are needed, so it is computed
        prefix.num_external_tokens = num_tokens
        prefix.load_async = load_async and num_tokens > 0
        if request.num_preemptions == 0 and request.prefill_stats is not None:
            request.prefill_stats.set(
                request.num_prompt_tokens, prefix.num_local_tokens, num_tokens
            )
        return True

    def _note_external(
        self, connector: KVConnectorBase_V1, request: Request, prefix: CachedPrefix
    ) -> None:
        """Tell the connector which blocks the request got, and count its look-up."""
        blocks = self.kv_cache_manager.get_blocks(request.request_id)
        connector.update_state_after_alloc(request, blocks, prefix.num_external_tokens)
        self._inflight_prefills.discard(request)
        if self.connector_prefix_cache_stats is not None and self._may_load(request, prefix):
            self.connector_prefix_cache_stats.record(
                num_tokens=request.num_tokens - prefix.num_local_tokens,
                num_hits=prefix.num_external_tokens,
                preempted=request.num_preemptions > 0,
            )

    def _start_async_load(
        self, request: Request, prefix: CachedPrefix, step: ScheduleStep
    ) -> Admission:
        """Give a request the blocks for what comes in the background, and let it wait for that.

        The tokens count as computed from now on; if the load fails, that is set back to what did
        arrive.
        """
        assert self.connector is not None
        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=prefix.num_local_tokens,
            new_computed_blocks=prefix.blocks,
            num_external_computed_tokens=prefix.num_external_tokens,
            delay_cache_blocks=True,
            full_sequence_must_fit=self.scheduler_config.scheduler_reserve_full_isl,
            reserved_blocks=self._inflight_prefill_reserved_blocks(step.num_scheduled_tokens),
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return Admission.NO_ROOM
        self._note_external(self.connector, request, prefix)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = prefix.num_tokens
        self._inflight_prefills.add(request)
        return Admission.SET_ASIDE

    def _inflight_prefill_reserved_blocks(self, num_scheduled_tokens: dict[str, int]) -> int:
        """Blocks that admitted prompts still have to take before they are complete.

        A load can't be preempted, so it is only started where all of them fit beside it.
        """
        unfinished = [
            request
            for request in self.running
            if request.num_computed_tokens + num_scheduled_tokens.get(request.request_id, 0)
            < request.num_tokens
        ]
        return sum(map(self._request_remaining_blocks, (*self._inflight_prefills, *unfinished)))

    def _request_remaining_blocks(self, request: Request) -> int:
        """Blocks the request still has to take to hold all of its known tokens."""
        num_tokens = min(request.num_tokens, self.max_model_len)
        return self.kv_cache_manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=self.kv_cache_manager.empty_kv_cache_blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=request.num_computed_tokens,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=True,
        )

    def _try_promote_loaded(self, request: Request) -> bool:
        """Make a request ready whose load has ended; False while it goes on."""
        if request.request_id not in self.finished_recving_kv_req_ids:
            return False
        self._update_waiting_for_remote_kv(request)
        preempted = request.num_preemptions > 0
        request.status = RequestStatus.PREEMPTED if preempted else RequestStatus.WAITING
        return True

    def _update_waiting_for_remote_kv(self, request: Request) -> None:
        """Let the blocks that arrived be found, now that they hold their entries."""
        request_id = request.request_id
        self.finished_recving_kv_req_ids.remove(request_id)
        failed = request_id in self.failed_recving_kv_req_ids
        self.failed_recving_kv_req_ids.discard(request_id)
        if failed and request.num_computed_tokens == 0:
            # Nothing arrived; it starts from the prefix cache again.
            self._free_request_blocks(request)
            return
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        if not failed and request.num_computed_tokens == request.num_tokens:
            # The logits of the last token are needed, so it is computed.
            request.num_computed_tokens -= 1

    def _holds_unscheduled_blocks(self) -> bool:
        """Whether blocks will come back to the pool though no running request gives them up."""
        if self._inflight_prefills or self.deferred_frees:
            return True
        if self.connector is None:
            return False
        return any(request.is_finished() for request in self.requests.values())

    # ------------------------------------------------------------------ the step's message

    def _add_connector_metadata(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> None:
        """Write down what the workers' connectors do in this step."""
        if self._rewound_req_ids:
            self._resend_rewound(scheduler_output)
        metadata = self._build_kv_connector_meta(connector, scheduler_output)
        scheduler_output.kv_connector_metadata = metadata

    def _build_kv_connector_meta(
        self, connector: KVConnectorBase_V1, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """What the workers' connectors need to know of this step; a plugin may replace this."""
        return connector.build_connector_meta(scheduler_output)

    def _note_scheduled_step(self, scheduler_output: SchedulerOutput) -> None:
        """Number this step and note it in its requests, for the frees that must wait for it."""
        if scheduler_output.total_num_scheduled_tokens > 0:
            self.sched_step_seq += 1
            for req_id in scheduler_output.num_scheduled_tokens:
                self.requests[req_id].last_sched_seq = self.sched_step_seq

    # ------------------------------------------------------------------ frees

    def _free_request_blocks(self, request: Request) -> None:
        """Give the request's blocks back, or as soon as no step in flight writes to them."""
        self._inflight_prefills.discard(request)
        self._rewound_req_ids.discard(request.request_id)
        if not self.defer_block_free or request.last_sched_seq <= self.processed_step_seq:
            self.kv_cache_manager.free(request)
            return
        blocks = self.kv_cache_manager.pop_blocks_for_free(request)
        if blocks:
            self.deferred_frees.append((self.sched_step_seq, blocks))

    def _note_processed_step(self, scheduler_output: SchedulerOutput) -> None:
        """Give back the blocks that waited for this step; all its writes have been done."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            return
        self.processed_step_seq += 1
        deferred = self.deferred_frees
        while deferred and deferred[0][0] <= self.processed_step_seq:
            # From the end, so that the tail of a prefix is evicted first.
            self.kv_cache_manager.block_pool.free_blocks(reversed(deferred.popleft()[1]))

    def _connector_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        """Ask the connector, before the blocks of an ended request go: (whether it frees them
        later, what the caller is to be told for a transfer)."""
        connector = self.connector
        assert connector is not None
        request_id, num_computed_tokens = request.request_id, request.num_computed_tokens
        # It must not see blocks that have left a window.
        self.kv_cache_manager.remove_skipped_blocks(
            request_id, num_computed_tokens, request.num_prompt_tokens
        )
        block_ids = self.kv_cache_manager.get_block_ids_for_computed_tokens(
            request_id, num_computed_tokens
        )
        if isinstance(connector, SupportsHMA):
            return connector.request_finished_all_groups(request, block_ids)
        (group,) = block_ids
        return connector.request_finished(request, group)

    def _is_loading(self, request: Request) -> bool:
        """For a request that is aborted: whether a transfer still writes to its blocks."""
        if request.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
            return False
        request_id = request.request_id
        loading = request_id not in self.finished_recving_kv_req_ids
        self.finished_recving_kv_req_ids.discard(request_id)
        self.failed_recving_kv_req_ids.discard(request_id)
        return loading

    def _free_blocks(self, request: Request) -> None:
        """Forget an ended request and give its blocks back."""
        assert request.is_finished()
        self._unloadable_req_ids.discard(request.request_id)
        self._free_request_blocks(request)
        del self.requests[request.request_id]

    def _num_delayed_frees(self) -> int:
        """Requests that have ended and whose blocks the connector still needs."""
        num_queued = len(self.waiting) + len(self.skipped_waiting) + len(self.running)
        return len(self.requests) - num_queued

    def _living_requests(self) -> dict[str, Request]:
        """`requests` without those that have ended and whose blocks the connector still needs."""
        if self._num_delayed_frees() == 0:
            return self.requests
        return {
            req_id: request
            for req_id, request in self.requests.items()
            if not request.is_finished()
        }

    # ------------------------------------------------------------------ what the workers report

    def _update_from_kv_xfer_finished(self, kv_connector_output: KVConnectorOutput) -> None:
        """Note which loads have ended, and free the blocks of what was sent."""
        if self.connector is not None:
            self.connector.update_connector_output(kv_connector_output)
        for req_id in kv_connector_output.finished_recving or ():
            request = self.requests[req_id]
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                self.finished_recving_kv_req_ids.add(req_id)
            else:
                self._free_blocks(request)  # it was aborted meanwhile
        for req_id in kv_connector_output.finished_sending or ():
            self._free_blocks(self.requests[req_id])

    def _take_connector_output(
        self, connector: KVConnectorBase_V1, model_runner_output: ModelRunnerOutput
    ) -> KVConnectorStats | None:
        """Take in what the workers report; returns the connector's statistics, the workers' and
        the scheduler's as one."""
        output = model_runner_output.kv_connector_output
        stats: KVConnectorStats | None = None
        if output is not None:
            self._update_from_kv_xfer_finished(output)
            stats = output.kv_connector_stats
        own = connector.get_kv_connector_stats()
        if own is None or own.is_empty():
            return stats
        return own if stats is None else stats.aggregate(own)

    # ------------------------------------------------------------------ control

    def reset_connector_cache(self) -> bool:
        """Empty the connector's cache; True if there is no connector."""
        if self.connector is None:
            return True
        if self.connector.reset_cache() is False:
            return False
        if self.connector_prefix_cache_stats is not None:
            self.connector_prefix_cache_stats.reset = True
        return True

    def _take_connector_prefix_cache_stats(self) -> PrefixCacheStats | None:
        """Look-ups in the connector's cache since the last call; None without a connector."""
        stats = self.connector_prefix_cache_stats
        if stats is not None:
            self.connector_prefix_cache_stats = PrefixCacheStats()
        return stats
