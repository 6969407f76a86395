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
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllmx.core.interface import PauseState, SchedulerInterface
from vllmx.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector
from vllmx.core.output import (
    CachedRequestData,
    GrammarOutput,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from vllmx.core.request_queue import RequestQueue, SchedulingPolicy, create_request_queue
from vllmx.core.utils import check_stop, remove_all
from vllmx.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllmx.exceptions import UserError
from vllmx.metrics.stats import PrefixCacheStats, SchedulerStats
from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Step:
    """The decisions of the step that is being put together."""

    token_budget: int
    timestamp: float
    # Position in the running list of the request that is looked at next.
    index: int = 0
    preempted: bool = False
    new_reqs: list[Request] = field(default_factory=list)
    resumed_reqs: list[Request] = field(default_factory=list)
    running_reqs: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    # Only the requests that got blocks in this step.
    new_blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)


class Scheduler(SchedulerInterface):
    """First come first served, or by priority, on one token budget and one pool of KV blocks.

    When the pool runs out, the last request to be served gives its blocks back, waits at the
    front of the queue, and is computed anew when there is room.
    """

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
    ) -> None:
        """`block_size`: tokens a prefix-cache hit is rounded down to; `hash_block_size`: tokens a
        block hash covers. `include_finished_set` reports ended requests to every client.
        `count_common_prefix`: for a runner that reads `SchedulerOutput.num_common_prefix_blocks`;
        it costs a look at every block of a request in every step, so it is 0 otherwise."""
        self.vllm_config = vllm_config
        self.scheduler_config = vllm_config.scheduler_config
        self.cache_config = vllm_config.cache_config
        self.kv_cache_config = kv_cache_config
        self.structured_output_manager: Any = structured_output_manager
        self.block_size = block_size
        self.log_stats = log_stats
        self.count_common_prefix = count_common_prefix

        self.max_num_running_reqs = self.scheduler_config.max_num_seqs
        max_num_batched_tokens = self.scheduler_config.max_num_batched_tokens
        max_num_scheduled_tokens = self.scheduler_config.max_num_scheduled_tokens
        max_model_len = vllm_config.model_config.max_model_len
        # Resolved when the engine starts.
        assert max_num_batched_tokens is not None and max_model_len is not None
        if max_num_scheduled_tokens is None:
            max_num_scheduled_tokens = max_num_batched_tokens
        self.max_num_scheduled_tokens = max_num_scheduled_tokens
        self.max_model_len = max_model_len
        self.scheduler_reserve_full_isl = self.scheduler_config.scheduler_reserve_full_isl
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
        # The same by client, for front ends that share an engine.
        self.finished_req_ids_dict: dict[int, set[str]] | None = (
            defaultdict(set) if include_finished_set else None
        )
        # Ended by schedule(), told by the update that follows it.
        self._gave_up: list[Request] = []
        self._pause_state = PauseState.UNPAUSED

        self.kv_metrics_collector: KVCacheMetricsCollector | None = None
        observability = vllm_config.observability_config
        if observability.kv_cache_metrics:
            self.kv_metrics_collector = KVCacheMetricsCollector(
                observability.kv_cache_metrics_sample
            )
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=self.max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=self.cache_config.enable_prefix_caching,
            log_stats=log_stats,
            scheduler_block_size=block_size,
            hash_block_size=block_size if hash_block_size is None else hash_block_size,
            metrics_collector=self.kv_metrics_collector,
            watermark=self.scheduler_config.watermark,
        )
        if kv_cache_config.has_mamba_layers and self.cache_config.mamba_cache_mode == "align":
            # It would have to end every piece of a prompt where a state is kept.
            raise UserError("cache.mamba_cache_mode=align is not built; choose none.")
        self.needs_kv_cache_zeroing = kv_cache_config.needs_kv_cache_zeroing

    # ------------------------------------------------------------------ schedule

    def schedule(self) -> SchedulerOutput:
        """Choose the requests of the next step and how many tokens each of them computes."""
        budget = self.max_num_scheduled_tokens
        if self._pause_state == PauseState.PAUSED_ALL:
            budget = 0
        step = _Step(budget, time.monotonic())
        self.kv_cache_manager.new_step_starts()

        self._schedule_running(step)
        # After a preemption there is no room for more, and the preempted go first.
        if not step.preempted and self._pause_state == PauseState.UNPAUSED:
            self._schedule_waiting(step)

        scheduler_output = self._make_scheduler_output(step)
        self._update_after_schedule(scheduler_output)
        return scheduler_output

    def _schedule_running(self, step: _Step) -> None:
        """Give tokens to the running requests, in their order."""
        running = self.running
        scheduled = step.running_reqs
        num_scheduled_tokens = step.num_scheduled_tokens
        unchanged_until = self.kv_cache_manager.coordinator.unchanged_until
        index = 0
        while index < len(running) and step.token_budget > 0:
            request = running[index]
            index += 1
            req_id = request.request_id
            num_computed_tokens = request.num_computed_tokens
            # Nearly every request of nearly every step: one token, and room for it.
            if len(request._all_token_ids) - num_computed_tokens == 1:
                num_new_tokens = 1
            else:
                num_new_tokens = self._num_new_tokens_of_running(request, step.token_budget)
                if num_new_tokens <= 0:
                    continue
            if num_computed_tokens + num_new_tokens > unchanged_until[req_id]:
                step.index = index
                new_blocks = self._allocate_or_preempt(request, num_new_tokens, step)
                index = step.index
                if new_blocks is None:
                    continue
                step.new_blocks[req_id] = new_blocks
            scheduled.append(request)
            num_scheduled_tokens[req_id] = num_new_tokens
            step.token_budget -= num_new_tokens

    def _num_new_tokens_of_running(self, request: Request, token_budget: int) -> int:
        """Tokens for a running request, 0 or less if there is nothing to compute."""
        num_placeholders = request.num_output_placeholders
        num_computed_tokens = request.num_computed_tokens
        if num_placeholders > 0 and (
            num_computed_tokens + 2 - num_placeholders
            >= request.num_prompt_tokens + request.max_tokens
        ):
            return 0  # the steps in flight bring its last token
        num_new_tokens = request.num_tokens + num_placeholders - num_computed_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # The last position belongs to a token that is sampled and never computed.
        return min(num_new_tokens, token_budget, self.max_model_len - 1 - num_computed_tokens)

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, step: _Step
    ) -> KVCacheBlocks | None:
        """Slots for a running request, taken from others if need be; None if it went itself."""
        allocate_slots = self.kv_cache_manager.allocate_slots
        while (new_blocks := allocate_slots(request, num_new_tokens)) is None:
            step.preempted = True
            victim = self._pop_victim(step)
            if victim is request and not self.running:
                # It had the whole pool and that was not enough: it can never go on.
                self._give_up(request, RequestStatus.FINISHED_LENGTH_CAPPED)
                return None
            self._preempt_request(victim, step.timestamp)
            if victim is request:
                return None
        return new_blocks

    def _pop_victim(self, step: _Step) -> Request:
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
        if victim.request_id in step.num_scheduled_tokens:
            # The blocks that this step was to fill can be found already, and stay empty now.
            self.kv_cache_manager.evict_uncomputed_blocks(victim)
            step.running_reqs.remove(victim)
            step.token_budget += step.num_scheduled_tokens.pop(victim.request_id)
            step.new_blocks.pop(victim.request_id, None)
        return victim

    def _preempt_request(self, request: Request, timestamp: float) -> None:
        """Take the blocks of a request that was just removed from the running ones, and queue it
        to be computed anew."""
        assert request.status == RequestStatus.RUNNING, "Only running requests can be preempted"
        self.kv_cache_manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        if self.log_stats:
            request.record_event(EngineCoreEventType.PREEMPTED, timestamp)
        self.waiting.prepend_request(request)
        self.reset_preempted_req_ids.add(request.request_id)

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
        self._gave_up.append(request)

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit waiting requests while there are tokens, places and blocks."""
        skipped = create_request_queue(self.policy)
        while (self.waiting or self.skipped_waiting) and step.token_budget > 0:
            if len(self.running) >= self.max_num_running_reqs:
                break
            queue = self._select_waiting_queue_for_scheduling()
            request = queue.peek_request()
            if self._is_blocked_waiting_status(
                request.status
            ) and not self._try_promote_blocked_waiting_request(request):
                skipped.prepend_request(queue.pop_request())
                continue
            if self._admit(request, step):
                queue.pop_request()
            elif self.running:
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

    def _admit(self, request: Request, step: _Step) -> bool:
        """Start or resume a waiting request; False if it has to wait, and all behind it too."""
        # Looked up anew at every try: blocks found earlier may have been evicted.
        computed_blocks, num_computed_tokens = self.kv_cache_manager.get_computed_blocks(request)
        assert num_computed_tokens <= request.num_tokens
        # Not num_prompt_tokens: a resumed request has output tokens to compute as well.
        num_new_tokens = request.num_tokens - num_computed_tokens
        threshold = self.scheduler_config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        if num_new_tokens > step.token_budget:
            if not self.scheduler_config.enable_chunked_prefill:
                return False
            num_new_tokens = step.token_budget

        new_blocks = self.kv_cache_manager.allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens=num_computed_tokens,
            new_computed_blocks=computed_blocks,
            full_sequence_must_fit=self.scheduler_reserve_full_isl,
            has_scheduled_reqs=bool(self.running),
        )
        if new_blocks is None:
            return False

        request_id = request.request_id
        if request.num_preemptions == 0 and request.prefill_stats is not None:
            # Blocks that a preempted request finds again are its own.
            request.prefill_stats.set(request.num_prompt_tokens, num_computed_tokens, 0)
        if self.log_stats:
            request.record_event(EngineCoreEventType.SCHEDULED, step.timestamp)
        is_new = request.status == RequestStatus.WAITING
        (step.new_reqs if is_new else step.resumed_reqs).append(request)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_computed_tokens
        self.running.append(request)
        step.new_blocks[request_id] = self.kv_cache_manager.get_blocks(request_id)
        step.num_scheduled_tokens[request_id] = num_new_tokens
        step.token_budget -= num_new_tokens
        return True

    def _make_scheduler_output(self, step: _Step) -> SchedulerOutput:
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
        return SchedulerOutput(
            scheduled_new_reqs=[
                # A resumed request goes as a new one, its output tokens as part of the prefill.
                NewRequestData.from_request(
                    request,
                    step.new_blocks[request.request_id].get_block_ids(),
                    request._all_token_ids.copy(),
                )
                for request in (*step.new_reqs, *step.resumed_reqs)
            ],
            scheduled_cached_reqs=self._make_cached_request_data(step),
            num_scheduled_tokens=step.num_scheduled_tokens,
            total_num_scheduled_tokens=total_num_scheduled_tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=num_common_prefix_blocks,
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=[],
            new_block_ids_to_zero=(
                (kv_cache_manager.take_new_block_ids() or None)
                if self.needs_kv_cache_zeroing
                else None
            ),
        )

    def _make_cached_request_data(self, step: _Step) -> CachedRequestData:
        reqs = step.running_reqs
        req_ids = [request.request_id for request in reqs]
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * len(reqs)
        if len(step.new_blocks) > len(step.new_reqs) + len(step.resumed_reqs):
            for i, req_id in enumerate(req_ids):
                if (blocks := step.new_blocks.get(req_id)) is not None:
                    new_block_ids[i] = blocks.get_block_ids(allow_none=True)
        return CachedRequestData(
            req_ids=req_ids,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_block_ids,
            num_computed_tokens=[request.num_computed_tokens for request in reqs],
            num_output_tokens=[
                len(request._output_token_ids) + request.num_output_placeholders for request in reqs
            ],
        )

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
        if self.structured_output_manager is not None:
            scheduler_output.has_structured_output_requests = any(
                requests[req_id].use_structured_output and not requests[req_id].is_prefill_chunk
                for req_id in scheduler_output.num_scheduled_tokens
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
        """Make a request ready whose grammar has been compiled; False if it isn't yet."""
        if request.status != RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return False
        if not request.structured_output_request.grammar:
            return False
        request.status = RequestStatus.WAITING
        return True

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
        req_ids = [
            req_id
            for req_id in scheduler_output.num_scheduled_tokens
            if (request := self.requests.get(req_id)) is not None
            and request.use_structured_output
            and not request.is_prefill_chunk
        ]
        if not req_ids:
            return None
        bitmask = self.structured_output_manager.grammar_bitmask(
            self.requests, req_ids, scheduler_output.scheduled_spec_decode_tokens
        )
        return GrammarOutput(req_ids, bitmask)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in the tokens of a step, end the requests that stop, and return by client index
        what is to be told. Results of requests that ended meanwhile are dropped."""
        outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        requests = self.requests
        req_id_to_index = model_runner_output.req_id_to_index
        sampled_token_ids = model_runner_output.sampled_token_ids
        has_extras = (
            model_runner_output.logprobs is not None
            or model_runner_output.num_nans_in_logits is not None
        )
        stopped_requests: set[Request] = set()
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
                output = self._make_output(request, new_token_ids, req_index, model_runner_output)
            else:
                output = EngineCoreOutput(req_id, new_token_ids)
            outputs[request.client_index].append(output)
            if stopped:
                self._free_request(request)
                stopped_requests.add(request)

        if stopped_requests:
            num_running = len(self.running)
            self.running = remove_all(self.running, stopped_requests)
            if num_running - len(self.running) < len(stopped_requests):
                # Some were preempted while their last token was on its way.
                self.waiting.remove_requests(stopped_requests)
        for request in self._gave_up:
            outputs[request.client_index].append(self._make_output(request, []))
        self._gave_up.clear()
        return self._make_engine_core_outputs(outputs, model_runner_output)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        """Append sampled tokens up to the one that ends the request, if one does."""
        stopped = False
        for num_new, token_id in enumerate(new_token_ids, 1):
            request.append_output_token_ids(token_id)
            stopped = check_stop(request, self.max_model_len)
            if stopped:
                del new_token_ids[num_new:]
                break
        return new_token_ids, stopped

    def _make_output(
        self,
        request: Request,
        new_token_ids: list[int],
        req_index: int = -1,
        model_runner_output: ModelRunnerOutput | None = None,
    ) -> EngineCoreOutput:
        """What to tell of `request`, row `req_index` of `model_runner_output` if there is one."""
        request_id = request.request_id
        output = EngineCoreOutput(request_id, new_token_ids)
        if request.status > RequestStatus.PREEMPTED:
            output.finish_reason = request.get_finished_reason()
            output.stop_reason = request.stop_reason
        if request.events:
            output.events = request.take_events()
        if request.trace_headers is not None:
            output.trace_headers = request.trace_headers
        is_first = request.prefill_stats is not None
        if is_first:
            output.prefill_stats = request.take_prefill_stats()
        if model_runner_output is None:
            return output
        if is_first:
            # A prompt that is computed again after a preemption brings its log-probs again.
            prompt_logprobs = model_runner_output.prompt_logprobs_dict.get(request_id)
            output.new_prompt_logprobs_tensors = prompt_logprobs
        logprobs = model_runner_output.logprobs
        if logprobs is not None and request.sampling_params.num_logprobs is not None:
            output.new_logprobs = logprobs.slice_request(req_index, len(new_token_ids))
        if model_runner_output.num_nans_in_logits is not None:
            num_nans = model_runner_output.num_nans_in_logits.get(request_id, 0)
            output.num_nans_in_logits = num_nans
        return output

    def _make_engine_core_outputs(
        self, outputs: dict[int, list[EngineCoreOutput]], model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        engine_core_outputs = {
            client_index: EngineCoreOutputs(outputs=client_outputs)
            for client_index, client_outputs in outputs.items()
        }
        if self.finished_req_ids_dict:
            for client_index, finished in self.finished_req_ids_dict.items():
                if client_index not in engine_core_outputs:
                    engine_core_outputs[client_index] = EngineCoreOutputs()
                engine_core_outputs[client_index].finished_requests = finished
            self.finished_req_ids_dict.clear()
        stats = self.make_stats(cudagraph_stats=model_runner_output.cudagraph_stats)
        if stats is not None:
            # One client is enough, and there must be one even if nobody has an output.
            if not engine_core_outputs:
                engine_core_outputs[0] = EngineCoreOutputs()
            next(iter(engine_core_outputs.values())).scheduler_stats = stats
        return engine_core_outputs

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Queue a new request; ValueError if its id is in use."""
        if request.request_id in self.requests:
            raise ValueError(
                f"Request id {request.request_id!r} is in use; wait for that request to end or "
                "give this one another id."
            )
        if self._is_blocked_waiting_status(request.status):
            self.skipped_waiting.add_request(request)
        else:
            self.waiting.add_request(request)
        self.requests[request.request_id] = request
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
            self.requests[req_id]
            for req_id in dict.fromkeys(request_ids)
            if req_id in self.requests
        ]
        running = {request for request in ending if request.status == RequestStatus.RUNNING}
        self.running = remove_all(self.running, running)
        if len(running) < len(ending):
            waiting = [request for request in ending if request not in running]
            self.waiting.remove_requests(waiting)
            self.skipped_waiting.remove_requests(waiting)
        for request in ending:
            request.status = finished_status
            self._free_request(request)
        return [(request.request_id, request.client_index) for request in ending]

    def _free_request(self, request: Request) -> None:
        """Give back the blocks of a request that ended, and forget it."""
        assert request.is_finished()
        request_id = request.request_id
        self.kv_cache_manager.free(request)
        self.finished_req_ids.add(request_id)
        if self.finished_req_ids_dict is not None:
            self.finished_req_ids_dict[request.client_index].add(request_id)
        del self.requests[request_id]

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting) requests."""
        return len(self.running), len(self.waiting) + len(self.skipped_waiting)

    def get_num_unfinished_requests(self) -> int:
        """Requests that could still be scheduled in the present pause state."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        if self._pause_state == PauseState.PAUSED_NEW:
            return len(self.running)
        return len(self.running) + len(self.waiting) + len(self.skipped_waiting)

    def has_finished_requests(self) -> bool:
        """Whether the runner has yet to hear of requests that ended."""
        return bool(self.finished_req_ids)

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

        With `reset_running_requests` those are preempted and computed anew. There is no connector
        to reset.
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
        assert done or not reset_running_requests, "blocks are held, but no request is running"
        return done

    def make_stats(self, cudagraph_stats: Any | None = None) -> SchedulerStats | None:
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
            kv_cache_eviction_events=collector.drain_events() if collector is not None else [],
            cudagraph_stats=cudagraph_stats,
        )

    def shutdown(self) -> None:
        """End all requests without telling anybody."""
        self.finish_requests(None, RequestStatus.FINISHED_ABORTED)
