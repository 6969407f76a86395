# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""The scheduler: which requests the next step computes, and how many tokens of each.

There is no prefill phase and no decode phase. A request has `num_tokens` known tokens of which
`num_computed_tokens` are in the KV cache; every step hands out tokens from one budget so that the
second number catches up with the first. Whole prompts, pieces of prompts, prefix-cache hits and
single decode tokens are all that one case.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from vllmx.core.encoder_scheduling import EncoderScheduling
from vllmx.core.grammar import (
    advance_grammar,
    any_constrained,
    ends_by_grammar,
    get_grammar_output,
    grammar_failure,
    is_grammar_ready,
)
from vllmx.core.interface import PauseState, SchedulerInterface
from vllmx.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector
from vllmx.core.kv_connector_scheduling import KVConnectorScheduling
from vllmx.core.kv_event_publisher import KVEventPublishing
from vllmx.core.mamba_align import MambaAlignScheduling, check_mamba_align
from vllmx.core.output import (
    DraftTokenIds,
    GrammarOutput,
    ModelRunnerOutput,
    SchedulerOutput,
)
from vllmx.core.request_output import add_transfer_params, by_client, make_output
from vllmx.core.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllmx.core.schedule_step import Admission, CachedPrefix, ScheduleStep
from vllmx.core.spec_decode import PLACEHOLDER, SpecDecoding
from vllmx.core.streaming_input import StreamingSessions
from vllmx.core.utils import check_stop, remove_all
from vllmx.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllmx.metrics.stats import PrefixCacheStats, SchedulerStats, SpecDecodingStats
from vllmx.request import Request, RequestStatus, StreamingUpdate

if TYPE_CHECKING:
    from vllmx.config import LoRAConfig, VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig
    from vllmx.core.kv_event_publisher import EventPublisher
    from vllmx.kv_transfer.metrics import KVConnectorStats

logger = logging.getLogger(__name__)


_UNKNOWN: Mapping[str, int] = Counter()
"""In place of the lengths up to which no request needs a block: 0 for each."""


class Scheduler(
    EncoderScheduling,
    KVConnectorScheduling,
    KVEventPublishing,
    MambaAlignScheduling,
    StreamingSessions,
    SchedulerInterface,
):
    """First come first served, or by priority, on one token budget and one pool of KV blocks.

    When the pool runs out, the last request to be served gives its blocks back, waits at the
    front of the queue, and is computed anew when there is room.
    """

    # What is off unless __init__ turns it on; each subject has a file of its own.
    spec_decoding: SpecDecoding | None = None
    use_eagle = False
    num_spec_tokens = num_lookahead_tokens = 0
    lora_config: LoRAConfig | None = None
    # Ended by schedule(), told by the update that follows it.
    _gave_up: tuple[Request, ...] = ()
    # Whether the last step that took in prompts left some for want of room.
    prefill_capacity_bound = False

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
        count_common_prefix: bool = False,
        kv_event_publisher: EventPublisher | None = None,
    ) -> None:
        """`block_size`: tokens a prefix-cache hit is rounded down to; `hash_block_size`: tokens a
        block hash covers. `include_finished_set` reports ended requests to every client.
        `count_common_prefix`: for a runner that reads `SchedulerOutput.num_common_prefix_blocks`;
        it costs a look at every block of a request in every step, so it is 0 otherwise.
        `kv_event_publisher`: of a scheduler before this one; None: made from the config."""
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager: Any = structured_output_manager
        # The requests with a grammar.
        self._constrained: set[str] = set()
        self.block_size = block_size
        self.hash_block_size = block_size if hash_block_size is None else hash_block_size
        self.log_stats = log_stats
        self.count_common_prefix = count_common_prefix
        self.lora_config = vllm_config.lora_config

        self._init_limits()
        self._init_queues()
        # The same as finished_req_ids by client, for front ends that share an engine.
        self.finished_req_ids_dict: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        self._init_spec_decoding()
        self._init_kv_cache_manager()
        self._init_kv_connector()
        self._init_kv_events(kv_event_publisher)
        self._init_mamba_align()
        self._init_encoder_inputs()

    def _init_limits(self) -> None:
        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        max_num_batched_tokens = self.scheduler_config.max_num_batched_tokens
        max_num_scheduled_tokens = self.scheduler_config.max_num_scheduled_tokens
        max_model_len = self.vllm_config.model_config.max_model_len
        # Resolved when the engine starts.
        assert max_num_batched_tokens is not None and max_model_len is not None
        if max_num_scheduled_tokens is None:
            max_num_scheduled_tokens = max_num_batched_tokens
        self.max_num_scheduled_tokens = max_num_scheduled_tokens
        self.max_model_len = max_model_len
        self.scheduler_reserve_full_isl = self.scheduler_config.scheduler_reserve_full_isl

    def _init_queues(self) -> None:
        try:
            self.policy = SchedulingPolicy(self.scheduler_config.policy)
        except ValueError as error:
            raise ValueError(
                f"Unknown scheduling policy: {self.scheduler_config.policy}"
            ) from error

        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(self.policy)
        # Waiting for something other than their turn; they go first once they can.
        self.skipped_waiting = create_request_queue(self.policy)
        self.running: list[Request] = []
        # What the next SchedulerOutput must tell the runner to drop.
        self.finished_req_ids: set[str] = set()
        self.reset_preempted_req_ids: set[str] = set()
        self._pause_state = PauseState.UNPAUSED

    def _init_spec_decoding(self) -> None:
        config = self.vllm_config.speculative_config
        if config is not None:
            self.spec_decoding = SpecDecoding(config, self.max_num_running_reqs)
            self.use_eagle = self.spec_decoding.use_eagle
            self.num_spec_tokens = self.spec_decoding.num_spec_tokens
            self.num_lookahead_tokens = self.spec_decoding.num_lookahead_tokens
        # Whether a decode may be more than one token and the slot for it.
        self.examine_every_request = config is not None

    def _init_kv_cache_manager(self) -> None:
        self.kv_metrics_collector: KVCacheMetricsCollector | None = None
        observability = self.vllm_config.observability_config
        if observability.kv_cache_metrics:
            self.kv_metrics_collector = KVCacheMetricsCollector(
                observability.kv_cache_metrics_sample
            )
        events = self.vllm_config.kv_events_config
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config=self.kv_cache_config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            enable_caching=bool(self.cache_config.enable_prefix_caching),
            use_eagle=self.use_eagle,
            log_stats=self.log_stats,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
            metrics_collector=self.kv_metrics_collector,
            watermark=self.scheduler_config.watermark,
        )
        self.needs_kv_cache_zeroing = self.kv_cache_config.needs_kv_cache_zeroing

    def _init_mamba_align(self) -> None:
        config = self.kv_cache_config
        self.need_mamba_block_aligned_split = (
            config.has_mamba_layers and self.cache_config.mamba_cache_mode == "align"
        )
        if self.need_mamba_block_aligned_split:
            check_mamba_align(config, self.cache_config, self.scheduler_config, self.block_size)

    # ------------------------------------------------------------------ schedule

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Choose the requests of the next step and how many tokens each of them computes.

        `throttle_prefills` leaves prompts to a later step if there are decodes to run and the last
        step that took prompts in had room for them all.
        """
        budget = self.max_num_scheduled_tokens
        if self._pause_state == PauseState.PAUSED_ALL:
            budget = 0
        step = ScheduleStep(budget, time.monotonic(), self.max_num_encoder_input_tokens)
        if throttle_prefills and not self.prefill_capacity_bound:
            step.defer_prefills = any(not request.is_prefill_chunk for request in self.running)
        self.kv_cache_manager.new_step_starts()

        self._schedule_running(step)
        # After a preemption there is no room for more, and the preempted go first.
        if not step.preempted and self._pause_state == PauseState.UNPAUSED:
            self._schedule_waiting(step)

        scheduler_output = self._make_scheduler_output(step)
        if self.connector is not None:
            self._add_connector_metadata(self.connector, scheduler_output)
        if self.defer_block_free:
            self._note_scheduled_step(scheduler_output)
        self._update_after_schedule(scheduler_output)
        return scheduler_output

    # ------------------------------------------------------------------ running requests

    def _schedule_running(self, step: ScheduleStep) -> None:
        """Give tokens to the running requests, in their order."""
        running = self.running
        scheduled = step.running_reqs
        num_scheduled_tokens = step.num_scheduled_tokens
        # Nearly every request of nearly every step: one token, and room for it.
        plain: int | None = 1
        unchanged_until: Mapping[str, int] = self.kv_cache_manager.coordinator.unchanged_until
        if self.examine_every_request or step.defer_prefills or step.encoder_budget:
            plain, unchanged_until = None, _UNKNOWN
        index = 0
        while index < len(running) and step.token_budget > 0:
            request = running[index]
            index += 1
            req_id = request.request_id
            num_computed_tokens = request.num_computed_tokens
            if len(request._all_token_ids) - num_computed_tokens == plain:
                num_new_tokens = 1
            else:
                num_new_tokens = self._num_new_tokens_of_running(request, step)
                if num_new_tokens <= 0:
                    continue
            if num_computed_tokens + num_new_tokens > unchanged_until[req_id]:
                step.index = index
                new_blocks = self._allocate_or_preempt(request, num_new_tokens, step)
                index = step.index
                if new_blocks is None:
                    continue
                step.new_blocks[req_id] = new_blocks
                if step.encoder_plans:
                    self._allocate_encoder_inputs(request, step)
            scheduled.append(request)
            num_scheduled_tokens[req_id] = num_new_tokens
            step.token_budget -= num_new_tokens
        if self.spec_decoding is not None:
            self.spec_decoding.take_drafts(step)

    def _num_new_tokens_of_running(self, request: Request, step: ScheduleStep) -> int:
        """Tokens for a running request, 0 or less if there is nothing to compute."""
        num_placeholders = request.num_output_placeholders
        num_computed_tokens = request.num_computed_tokens
        if num_placeholders > 0 and (
            num_computed_tokens + 2 - num_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0  # the steps in flight bring its last token
        if step.defer_prefills and request.is_prefill_chunk:
            return 0
        # num_tokens_with_spec and min() written out: with async scheduling each decode comes by.
        num_new_tokens = len(request._all_token_ids) + len(request.spec_token_ids)
        num_new_tokens += num_placeholders - num_computed_tokens
        # The last position belongs to a token that is sampled and never computed.
        room = self.max_model_len - 1 - num_computed_tokens
        if num_new_tokens > room:
            num_new_tokens = room
        if num_new_tokens > 1:
            threshold = self.scheduler_config.long_prefill_token_threshold
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            num_new_tokens = min(num_new_tokens, step.token_budget)
        if request.mm_features:
            num_new_tokens = self._plan_encoder_inputs(
                request, num_computed_tokens, num_new_tokens, step
            )
        if self.need_mamba_block_aligned_split:
            return self._mamba_block_aligned_split(request, num_new_tokens)
        return num_new_tokens

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, step: ScheduleStep
    ) -> KVCacheBlocks | None:
        """Slots for a running request, taken from others if need be; None if it went itself."""
        allocate_slots = self.kv_cache_manager.allocate_slots
        lookahead = self.num_lookahead_tokens
        while (
            new_blocks := allocate_slots(request, num_new_tokens, num_lookahead_tokens=lookahead)
        ) is None:
            step.preempted = True
            alone = len(self.running) == 1 and not self._waiters_hold_blocks()
            if alone and request.num_output_placeholders > 0:
                return None  # it is given up once the step in flight has brought its token
            victim = self._pop_victim(step)
            if victim is request and alone:
                # It had the whole pool and that was not enough: it can never go on.
                self._give_up(request, RequestStatus.FINISHED_LENGTH_CAPPED)
                return None
            self._preempt_request(victim, step.timestamp)
            if victim is request:
                return None
        return new_blocks

    def _pop_victim(self, step: ScheduleStep) -> Request:
        """Take the least urgent request out of the running ones and out of `step`."""
        running = self.running
        if self.policy == SchedulingPolicy.FCFS:
            position = len(running) - 1
        else:
            # The order of the queue, ties included: else two equals could evict each other forever.
            position = max(range(len(running)), key=lambda i: running[i].sort_key)
        victim = running.pop(position)
        if position < step.index:
            step.index -= 1
        if step.remove_running(victim):
            # The blocks that this step was to fill can be found already, and stay empty now.
            self.kv_cache_manager.evict_uncomputed_blocks(victim)
        if victim.mm_features:
            self._take_back_encoder_inputs(victim, step)
        return victim

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Take the blocks of a request that was just removed from the running ones, and queue it
        to be computed anew."""
        assert request.status == RequestStatus.RUNNING, "Only running requests can be preempted"
        self._free_request_blocks(request)
        self.encoder_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.spec_token_ids = []
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

    def _others_hold_blocks(self) -> bool:
        """Whether blocks may come free without anything being scheduled, or by what runs."""
        return bool(self.running) or self._waiters_hold_blocks()

    def _waiters_hold_blocks(self) -> bool:
        """Whether blocks may come free though nothing that runs gives them up."""
        return self.num_waiting_for_streaming_input > 0 or self._holds_unscheduled_blocks()

    def _give_up(self, request: Request, status: RequestStatus) -> None:
        """End a request that the KV cache cannot hold even when it is alone."""
        logger.warning(
            "Request %s ends at %d tokens: the KV cache holds no more (%d blocks). "
            "Give it more memory or lower max_model_len.",
            request.request_id,
            request.num_tokens,
            self.kv_cache_config.num_blocks,
        )
        request.status = status
        self._free_request(request)
        self._gave_up += (request,)

    def _end_without_grammar(self, request: Request) -> None:
        """End a request whose grammar could not be compiled, and say why."""
        request.stop_reason = f"The constraint cannot be compiled: {grammar_failure(request)}"
        logger.error("Request %s ends with an error: %s", request.request_id, request.stop_reason)
        request.status = RequestStatus.FINISHED_ERROR
        self._free_request(request)
        self._gave_up += (request,)

    # ------------------------------------------------------------------ waiting requests

    def _schedule_waiting(self, step: ScheduleStep) -> None:
        """Admit waiting requests while there are tokens, places and blocks."""
        skipped = create_request_queue(self.policy)
        while (self.waiting or self.skipped_waiting) and step.token_budget > 0:
            num_places_taken = len(self.running) + self.num_waiting_for_streaming_input
            if num_places_taken >= self.max_num_running_reqs:
                break
            queue = self._select_waiting_queue_for_scheduling()
            request = queue.peek_request()
            admission = self._admit(request, step)
            if admission is Admission.ADMITTED:
                queue.pop_request()
            elif admission is Admission.SET_ASIDE:
                skipped.prepend_request(queue.pop_request())
            elif admission is Admission.FAILED:
                self._end_without_grammar(queue.pop_request())
            elif self._others_hold_blocks():
                break
            else:
                # Every block and every token was to be had: its turn would never come.
                queue.pop_request()
                self._give_up(
                    request,
                    RequestStatus.FINISHED_LENGTH_CAPPED
                    if request.num_output_tokens
                    else RequestStatus.FINISHED_IGNORED,
                )
        if skipped:
            self.skipped_waiting.prepend_requests(skipped)
        if not step.defer_prefills:
            self.prefill_capacity_bound = bool(self.waiting)

    def _admit(self, request: Request, step: ScheduleStep) -> Admission:
        """Start or resume a waiting request, if it can be."""
        if self._is_blocked_waiting_status(
            request.status
        ) and not self._try_promote_blocked_waiting_request(request):
            return Admission.FAILED if grammar_failure(request) else Admission.SET_ASIDE
        if self.lora_config is not None and not step.has_lora_slot(
            request, self.lora_config.max_loras
        ):
            return Admission.SET_ASIDE
        prefix = self._find_prefix(request)
        if self.connector is not None and not self._find_external(request, prefix):
            return Admission.SET_ASIDE
        if self.ec_connector is not None and not self._has_encoder_inputs_ready(request, prefix):
            return Admission.SET_ASIDE
        if prefix.load_async:
            return self._start_async_load(request, prefix, step)
        num_new_tokens = self._num_new_tokens_of_waiting(request, prefix.num_tokens, step)
        if request.mm_features:
            num_new_tokens = self._plan_encoder_inputs(
                request, prefix.num_tokens, num_new_tokens, step
            )
        if self.need_mamba_block_aligned_split:
            num_new_tokens = self._align_admission(request, num_new_tokens, prefix)
        if num_new_tokens == 0:
            return self._stays_waiting(request, step)
        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=prefix.num_local_tokens,
            new_computed_blocks=prefix.blocks,
            num_lookahead_tokens=self.num_lookahead_tokens,
            num_external_computed_tokens=prefix.num_external_tokens,
            num_encoder_tokens=self._num_cross_attention_tokens(request, step),
            full_sequence_must_fit=self.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return self._stays_waiting(request, step)
        if self.connector is not None:
            self._note_external(self.connector, request, prefix)
        self._start(request, prefix.num_tokens, num_new_tokens, step)
        return Admission.ADMITTED

    def _find_prefix(self, request: Request) -> CachedPrefix:
        """What of a waiting request is computed already."""
        if request.num_computed_tokens > 0:
            return CachedPrefix(
                self.kv_cache_manager.empty_kv_cache_blocks, 0, request.num_computed_tokens
            )
        # Looked up anew at every try: blocks found earlier may have been evicted.
        blocks, num_local_tokens = self.kv_cache_manager.get_computed_blocks(request)
        prefix = CachedPrefix(blocks, num_local_tokens)
        assert prefix.num_tokens <= request.num_tokens
        if request.num_preemptions == 0 and request.prefill_stats is not None:
            # Blocks that a preempted request finds again are its own.
            request.prefill_stats.set(request.num_prompt_tokens, num_local_tokens, 0)
        return prefix

    def _num_new_tokens_of_waiting(
        self, request: Request, num_computed_tokens: int, step: ScheduleStep
    ) -> int:
        """Tokens for a waiting request, 0 if the step has none for it."""
        # Not num_prompt_tokens: a resumed request has output tokens to compute as well.
        num_new_tokens = request.num_tokens - num_computed_tokens
        if step.defer_prefills and num_new_tokens > 1:
            return 0
        threshold = self.scheduler_config.long_prefill_token_threshold
        if (
            num_new_tokens == 1
            and self.spec_decoding is not None
            and self.spec_decoding.wants_padding(step)
        ):
            num_new_tokens += self.num_spec_tokens
            room = min(step.token_budget, self.max_model_len - num_computed_tokens)
            # Better no decode than one of another length than the rest.
            return num_new_tokens if num_new_tokens <= room else 0
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        if num_new_tokens > step.token_budget and not self.scheduler_config.enable_chunked_prefill:
            return 0
        return min(num_new_tokens, step.token_budget)

    def _start(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, step: ScheduleStep
    ) -> None:
        """Let a request run that has its slots."""
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, step.timestamp)
        step.add_admitted(
            request,
            num_new_tokens,
            self.kv_cache_manager.get_blocks(request.request_id),
            is_new=request.status == RequestStatus.WAITING,
        )
        if step.encoder_plans:
            self._allocate_encoder_inputs(request, step)
        num_padding = num_computed_tokens + num_new_tokens - request.num_tokens
        if num_padding > 0:
            step.spec_decode_tokens[request.request_id] = [PLACEHOLDER] * num_padding
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        self.running.append(request)

    # ------------------------------------------------------------------ the step, written down

    def _make_scheduler_output(self, step: ScheduleStep) -> SchedulerOutput:
        """Write the decisions down for the runner."""
        total_num_scheduled_tokens = sum(step.num_scheduled_tokens.values())
        assert total_num_scheduled_tokens + step.token_budget <= self.max_num_scheduled_tokens
        assert step.token_budget >= 0
        assert len(self.running) <= self.max_num_running_reqs
        assert len(step.num_scheduled_tokens) <= len(self.running)

        kv_cache_manager = self.kv_cache_manager
        if self.running and self.count_common_prefix:
            num_common_prefix_blocks = kv_cache_manager.get_num_common_prefix_blocks(
                self.running[0].request_id
            )
        else:
            num_common_prefix_blocks = [0] * len(self.kv_cache_config.kv_cache_groups)
        output = SchedulerOutput(
            scheduled_new_reqs=step.new_request_data(),
            scheduled_cached_reqs=step.cached_request_data(),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=total_num_scheduled_tokens,
            scheduled_spec_decode_tokens=step.spec_decode_tokens,
            scheduled_encoder_inputs=step.encoder_inputs,
            num_common_prefix_blocks=num_common_prefix_blocks,
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
        )
        if self.needs_kv_cache_zeroing:
            output.new_block_ids_to_zero = kv_cache_manager.take_new_block_ids() or None
        if self.spec_decoding is not None:
            output.num_spec_tokens_to_schedule = self.spec_decoding.num_spec_tokens_to_schedule(
                len(step.num_scheduled_tokens)
            )
        if self.ec_connector is not None:
            output.ec_connector_metadata = self.ec_connector.build_connector_meta(output)
        return output

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        """Count the scheduled tokens as computed, so that the next step can be scheduled before
        this one has run."""
        requests = self.requests
        for req_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = requests[req_id]
            num_computed_tokens = request.num_computed_tokens + num_tokens
            request.num_computed_tokens = num_computed_tokens
            request.is_prefill_chunk = num_computed_tokens < (
                len(request._all_token_ids) + request.num_output_placeholders
            )
        if self._constrained and self.structured_output_manager is not None:
            scheduler_output.has_structured_output_requests = any_constrained(
                scheduler_output, requests
            )
        # New sets, as scheduler_output keeps the old ones.
        self.finished_req_ids = set()
        self.reset_preempted_req_ids = set()

    # ------------------------------------------------------------------ waiting queues

    @staticmethod
    def _is_blocked_waiting_status(status: RequestStatus) -> bool:
        return (
            RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
            <= status
            <= RequestStatus.WAITING_FOR_STREAMING_REQ
        )

    def _try_promote_blocked_waiting_request(self, request: Request) -> bool:
        """Make a request ready if what it waited for is there; False if it isn't yet.

        A session that waits for a piece of prompt is made ready by the piece itself.
        """
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            return self._try_promote_loaded(request)
        if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return False
        if grammar_failure(request) is not None or not is_grammar_ready(request):
            return False
        request.status = RequestStatus.WAITING
        return True

    def _enqueue_waiting_request(self, request: Request) -> None:
        blocked = self._is_blocked_waiting_status(request.status)
        (self.skipped_waiting if blocked else self.waiting).add_request(request)

    def _select_waiting_queue_for_scheduling(self) -> RequestQueue:
        if self.policy == SchedulingPolicy.FCFS:
            return self.skipped_waiting or self.waiting
        if self.waiting and self.skipped_waiting:
            if self.waiting.peek_request() < self.skipped_waiting.peek_request():
                return self.waiting
            return self.skipped_waiting
        return self.waiting or self.skipped_waiting

    # ------------------------------------------------------------------ update

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        """Allowed tokens of the constrained requests in `scheduler_output`, None without any."""
        if not scheduler_output.has_structured_output_requests:
            return None
        return get_grammar_output(self.structured_output_manager, scheduler_output, self.requests)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Take in the drafts for the next step; those of requests that ended are dropped."""
        assert self.spec_decoding is not None, "drafts came, but speculative_config is None"
        self.spec_decoding.update_draft_token_ids(
            draft_token_ids, self.requests, self.structured_output_manager
        )

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        """Put drafts into a step that was scheduled with placeholders for them."""
        assert self.spec_decoding is not None, "drafts came, but speculative_config is None"
        self.spec_decoding.update_draft_token_ids_in_output(
            draft_token_ids, scheduler_output, self.requests, self.structured_output_manager
        )

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the tokens of a step, end the requests that stop, and return by client index
        what is to be told. Results of requests that ended meanwhile are dropped."""
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        requests = self.requests
        failed_loads: set[str] = set()
        spec_decoding_stats: SpecDecodingStats | None = None
        kv_connector_stats: KVConnectorStats | None = None
        if self.defer_block_free:
            self._note_processed_step(scheduler_output)
        if self.connector is not None:
            failed_loads = self._take_load_errors(scheduler_output, model_runner_output)
            requests = self._living_requests()
        if scheduler_output.scheduled_spec_decode_tokens:
            assert self.spec_decoding is not None
            spec_decoding_stats = self.spec_decoding.take_back_rejected(
                scheduler_output, model_runner_output, requests
            )

        stopped = self._take_tokens(scheduler_output, model_runner_output, requests, outputs)
        if stopped and (transfer_params := self._remove_stopped(stopped)):
            add_transfer_params(outputs, transfer_params)
        for request in self._gave_up:
            outputs[request.client_index].append(make_output(request, []))
        self._gave_up = ()

        if self.max_num_encoder_input_tokens:
            self._free_computed_encoder_inputs(scheduler_output.num_scheduled_tokens)
        if self.ec_connector is not None and model_runner_output.ec_connector_output is not None:
            self.ec_connector.update_connector_output(model_runner_output.ec_connector_output)
        if self.connector is not None:
            self._end_failed_loads(failed_loads, outputs)
            kv_connector_stats = self._take_connector_output(self.connector, model_runner_output)
        if self.takes_kv_events:
            self._publish_kv_events()
        stats = self.make_stats(
            spec_decoding_stats, kv_connector_stats, model_runner_output.cudagraph_stats
        )
        return by_client(outputs, self.finished_req_ids_dict, stats)

    def _take_tokens(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        requests: Mapping[str, Request],
        outputs: defaultdict[int, list[EngineCoreOutput]],
    ) -> list[Request]:
        """Append the sampled tokens to `requests` and what to tell of them to `outputs`; the
        requests that stop."""
        stopped_requests: list[Request] = []
        req_id_to_index = model_runner_output.req_id_to_index
        sampled_token_ids = model_runner_output.sampled_token_ids
        has_extras = (
            model_runner_output.logprobs is not None
            or model_runner_output.num_nans_in_logits is not None
            or scheduler_output.has_structured_output_requests
        )
        for req_id in scheduler_output.num_scheduled_tokens if sampled_token_ids else ():
            request = requests.get(req_id)
            if request is None:
                continue  # it was aborted while the model computed it
            req_index = req_id_to_index[req_id]
            new_token_ids = sampled_token_ids[req_index]
            if not new_token_ids:
                continue  # its prompt is not complete yet
            new_token_ids, stopped = self._update_request_with_output(request, new_token_ids)
            if not new_token_ids:
                continue  # it was preempted by reset_prefix_cache in the meantime
            if stopped or has_extras or request.events or request.prefill_stats is not None:
                stopped |= self._stops_by_grammar(request, new_token_ids)
                output = make_output(request, new_token_ids, req_index, model_runner_output)
            else:
                output = EngineCoreOutput(req_id, new_token_ids)
            outputs[request.client_index].append(output)
            if stopped:
                stopped_requests.append(request)
        return stopped_requests

    def _stops_by_grammar(self, request: Request, new_token_ids: list[int]) -> bool:
        """Advance the grammar of `request`, if it has one; True if that ends it: with an error if
        the grammar forbids the tokens, else as nothing can follow them."""
        if request.structured_output_request is None:
            return False
        manager = self.structured_output_manager
        if not advance_grammar(manager, request, new_token_ids):
            request.status = RequestStatus.FINISHED_ERROR
            request.stop_reason = None
        elif not request.is_finished() and ends_by_grammar(request):
            request.status = RequestStatus.FINISHED_STOPPED
        else:
            return False
        request.resumable = False
        return True

    def _remove_stopped(self, stopped: list[Request]) -> dict[str, dict[str, Any]]:
        """Take requests that have stopped out of the queues; a session waits, the rest is freed.

        Returns what their callers are to be told for a KV transfer, by request id.
        """
        num_running = len(self.running)
        self.running = remove_all(self.running, set(stopped))
        if num_running - len(self.running) < len(stopped):
            # Some were preempted while their last token was on its way.
            self.waiting.remove_requests(stopped)
        transfer_params: dict[str, dict[str, Any]] = {}
        for request in stopped:
            if self._handle_stopped_request(request):
                params = self._free_request(request)
                if params is not None:
                    transfer_params[request.request_id] = params
        return transfer_params

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Append sampled tokens up to the one that ends the request, if one does."""
        if len(new_token_ids) == 1:
            request.append_output_token_ids(new_token_ids[0])
            return new_token_ids, check_stop(request, self.max_model_len)
        stopped = False
        for num_new, token_id in enumerate(new_token_ids, 1):
            request.append_output_token_ids(token_id)
            stopped = check_stop(request, self.max_model_len)
            if stopped:
                del new_token_ids[num_new:]
                break
        return new_token_ids, stopped

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a new request, or the next piece of a session's prompt under the session's id (a
        piece that is not resumable ends it). ValueError if the id is in use otherwise."""
        existing = self.requests.get(request.request_id)
        if existing is not None:
            self._add_to_session(existing, StreamingUpdate.from_request(request))
            return
        if request.mm_features:
            self._check_encoder_inputs(request)
        if request.resumable:
            request.streaming_queue = deque()
        self._enqueue_waiting_request(request)
        self.requests[request.request_id] = request
        if request.use_structured_output:
            self._constrained.add(request.request_id)
        if self.connector is not None:
            self.connector.on_new_request(request)
        if self.log_stats:
            request.record_event(EngineCoreEventType.QUEUED)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[tuple[str, int]]:
        """End requests from outside (None: all). Unknown and finished ids are ignored.

        Returns the (request id, client index) of those that were alive.
        """
        assert RequestStatus.is_finished(finished_status)
        if request_ids is None:
            request_ids = self.requests
        elif isinstance(request_ids, str):
            request_ids = (request_ids,)
        ending = [
            request
            for req_id in dict.fromkeys(request_ids)
            if (request := self.requests.get(req_id)) is not None and not request.is_finished()
        ]
        running = {request for request in ending if request.status == RequestStatus.RUNNING}
        self.running = remove_all(self.running, running)
        if len(running) < len(ending):
            waiting = [request for request in ending if request not in running]
            self.waiting.remove_requests(waiting)
            self.skipped_waiting.remove_requests(waiting)
        for request in ending:
            if request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                self.num_waiting_for_streaming_input -= 1
            is_loading = self._is_loading(request)
            request.status = finished_status
            if request.structured_output_request is not None:
                request.structured_output_request.cancel()
            self._free_request(request, delay_free_blocks=is_loading)
        return [(request.request_id, request.client_index) for request in ending]

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> dict[str, Any] | None:
        """Give back the blocks of a request that ended, and forget it, unless a KV transfer still
        needs them. Returns what the caller is to be told for a transfer."""
        assert request.is_finished()
        request_id = request.request_id
        transfer_params = None
        if self.connector is not None:
            keeps_blocks, transfer_params = self._connector_finished(request)
            delay_free_blocks |= keeps_blocks
        self.encoder_cache_manager.free(request)
        self._constrained.discard(request_id)
        self.finished_req_ids.add(request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request_id)
        if not delay_free_blocks:
            self._free_blocks(request)
        return transfer_params

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return len(self.running), len(self.waiting) + len(self.skipped_waiting)

    def get_num_unfinished_requests(self) -> int:
        """Requests that could still be scheduled in the present pause state."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        if self._pause_state == PauseState.PAUSED_NEW:
            return len(self.running)
        num_waiting = len(self.waiting) + len(self.skipped_waiting)
        return len(self.running) + num_waiting - self.num_waiting_for_streaming_input

    def has_finished_requests(self) -> bool:
        """Whether the runner has yet to hear of requests that ended, or of blocks that are sent."""
        if self.finished_req_ids:
            return True
        return self.connector is not None and self._num_delayed_frees() > 0

    def has_requests(self) -> bool:
        """Whether a step is due: to compute, to tell the runner who ended, or to send entries."""
        if super().has_requests():
            return True
        return self.connector is not None and self.connector.has_pending_push_work()

    # ------------------------------------------------------------------ control

    @property
    def pause_state(self) -> PauseState:
        """What is paused now."""
        return self._pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""
        self._pause_state = pause_state

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empty the prefix cache; False if running requests still hold blocks.

        With `reset_running_requests` those are preempted and computed anew. `reset_connector`
        empties the KV connector's cache as well, where there is one.
        """
        if reset_running_requests:
            timestamp = time.monotonic()
            # From the last to the first, so that they stand in the queue as they ran.
            while self.running:
                request = self.running.pop()
                self._preempt_request(request, timestamp)
                # What steps in flight bring for it belongs to the old cache.
                request.async_tokens_to_discard = request.num_output_placeholders
                request.num_output_placeholders = 0
        done = self.kv_cache_manager.reset_prefix_cache()
        assert done or not reset_running_requests or self._others_hold_blocks(), (
            "blocks are held, but no request is running"
        )
        if reset_connector:
            done = self.reset_connector_cache() and done
        return done

    def make_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None = None,
        kv_connector_stats: KVConnectorStats | None = None,
        cudagraph_stats: Any | None = None,
    ) -> SchedulerStats | None:
        """State for the loggers, None where statistics are off."""
        if not self.log_stats:
            return None
        collector = self.kv_metrics_collector
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_skipped_waiting_reqs=len(self.skipped_waiting),
            kv_cache_usage=self.kv_cache_manager.usage,
            prefix_cache_stats=self.kv_cache_manager.make_prefix_cache_stats()
            or PrefixCacheStats(),
            connector_prefix_cache_stats=self._take_connector_prefix_cache_stats(),
            kv_cache_eviction_events=collector.drain_events() if collector is not None else [],
            spec_decoding_stats=spec_decoding_stats,
            cudagraph_stats=cudagraph_stats,
            kv_connector_stats=kv_connector_stats.data if kv_connector_stats else None,
        )

    def shutdown(self) -> None:
        """End all requests without telling anybody."""
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.kv_event_publisher.shutdown()
        if self.connector is not None:
            self.connector.shutdown()
        if self.ec_connector is not None:
            self.ec_connector.shutdown()
