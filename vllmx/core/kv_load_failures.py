# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""Loads of KV entries that fail: which requests are affected, and what becomes of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllmx.core.output import ModelRunnerOutput, NewRequestData, SchedulerOutput
from vllmx.engine import EngineCoreOutput
from vllmx.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllmx.core.kv_cache_manager import KVCacheManager
    from vllmx.core.request_queue import RequestQueue

logger = logging.getLogger(__name__)


class KVLoadFailures:
    """Part of KVConnectorScheduling; nothing here runs unless a worker reports a failed load."""

    kv_cache_manager: KVCacheManager
    block_size: int
    requests: dict[str, Request]
    skipped_waiting: RequestQueue
    running: list[Request]

    if TYPE_CHECKING:

        def finish_requests(
            self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
        ) -> list[tuple[str, int]]:
            """See Scheduler."""

    def _init_load_failures(self) -> None:
        self.recompute_kv_load_failures = True
        # Requests whose load in the background failed; they wait until it has ended.
        self.failed_recving_kv_req_ids: set[str] = set()
        # Requests whose load failed: they compute what is missing, as the next might fail as well.
        self._unloadable_req_ids: set[str] = set()
        # Running requests whose load failed: the runner must take them in anew.
        self._rewound_req_ids: set[str] = set()

    def _take_load_errors(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> set[str]:
        """Deal with blocks that were not filled; the ids of the requests to end for that."""
        output = model_runner_output.kv_connector_output
        if output is None or not output.invalid_block_ids:
            return set()
        return self._handle_invalid_blocks(
            output.invalid_block_ids, scheduler_output, model_runner_output
        )

    def _handle_invalid_blocks(
        self,
        invalid_block_ids: set[int],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> set[str]:
        """Set back the requests whose blocks were not filled in the step that has just run, and
        drop the tokens it has for them; returns the ids of those to end (policy "fail")."""
        computed_before = _computed_before(scheduler_output)
        loading = [
            request
            for request in self.skipped_waiting
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        loading_ids, num_loading_tokens, _ = self._update_requests_with_invalid_blocks(
            loading, invalid_block_ids, computed_before, evict_blocks=False
        )
        running_ids, num_running_tokens, to_evict = self._update_requests_with_invalid_blocks(
            self.running, invalid_block_ids, computed_before
        )
        failed = loading_ids | running_ids
        if not failed:
            return failed
        # Else a request that is admitted before they are computed would hit them.
        if to_evict:
            self.kv_cache_manager.evict_blocks(to_evict)
        for req_id in running_ids:
            self._discard_tokens(self.requests[req_id], model_runner_output)
        num_tokens = num_loading_tokens + num_running_tokens
        if not self.recompute_kv_load_failures:
            logger.error(
                "KV load failed: %d request(s) end with an error, %d tokens (policy fail): %s",
                len(failed),
                num_tokens,
                ", ".join(sorted(failed)),
            )
            return failed
        logger.warning(
            "KV load failed: %d request(s) compute %d tokens themselves (policy recompute).",
            len(failed),
            num_tokens,
        )
        self._unloadable_req_ids |= failed
        self.failed_recving_kv_req_ids |= loading_ids
        self._rewound_req_ids |= running_ids
        return set()

    def _update_requests_with_invalid_blocks(
        self,
        requests: Iterable[Request],
        invalid_block_ids: set[int],
        computed_before: dict[str, int],
        evict_blocks: bool = True,
    ) -> tuple[set[str], int, set[int]]:
        """Cut `num_computed_tokens` of each request at its first invalid block.

        `computed_before`: the number that a request had in the step at hand, as only what was
        there before can have come from outside. An invalid block that several share is computed by
        the first of them. Returns the ids of the affected requests, how many tokens have to be
        computed again, and the blocks to drop from the prefix cache (none without `evict_blocks`).
        """
        affected: set[str] = set()
        num_affected_tokens = 0
        to_evict: set[int] = set()
        taken: set[int] = set()  # invalid blocks that an earlier request computes
        for request in requests:
            req_id = request.request_id
            (block_ids,) = self.kv_cache_manager.get_block_ids(req_id)
            before = computed_before.get(req_id, request.num_computed_tokens)
            num_blocks = -(-before // self.block_size)
            invalid = [i for i, b in enumerate(block_ids[:num_blocks]) if b in invalid_block_ids]
            if not invalid:
                continue
            affected.add(req_id)
            own = [i for i in invalid if block_ids[i] not in taken]
            taken.update(block_ids[i] for i in own)
            # One that joined after this step has read the shared blocks already.
            if own or req_id not in computed_before:
                start = own[0] if own else invalid[0]
                request.num_computed_tokens = start * self.block_size
                if evict_blocks:
                    to_evict.update(block_ids[start:])
            else:
                request.num_computed_tokens = before
            num_affected_tokens += before - request.num_computed_tokens
        return affected, num_affected_tokens, to_evict

    def _discard_tokens(self, request: Request, model_runner_output: ModelRunnerOutput) -> None:
        """Drop the tokens of a request whose entries are wrong: those at hand, and those that
        steps in flight will bring."""
        request.async_tokens_to_discard += request.num_output_placeholders
        request.num_output_placeholders = 0
        index = model_runner_output.req_id_to_index.get(request.request_id)
        if index is None or not model_runner_output.sampled_token_ids:
            return
        num_sampled = len(model_runner_output.sampled_token_ids[index])
        model_runner_output.sampled_token_ids[index] = []
        request.async_tokens_to_discard = max(request.async_tokens_to_discard - num_sampled, 0)

    def _end_failed_loads(
        self, req_ids: set[str], outputs: dict[int, list[EngineCoreOutput]]
    ) -> None:
        """End requests whose load failed with an error, and add that to `outputs`, by client."""
        if not req_ids:
            return
        requests = [self.requests[req_id] for req_id in sorted(req_ids)]
        self.finish_requests(req_ids, RequestStatus.FINISHED_ERROR)
        for request in requests:
            outputs[request.client_index].append(
                EngineCoreOutput(
                    request.request_id,
                    [],
                    finish_reason=request.get_finished_reason(),
                    events=request.take_events(),
                    trace_headers=request.trace_headers,
                )
            )

    def _resend_rewound(self, scheduler_output: SchedulerOutput) -> None:
        """Send requests that were set back as new ones, so that the runner forgets what it
        computed and sampled from blocks that were never filled."""
        cached = scheduler_output.scheduled_cached_reqs
        for req_id in self._rewound_req_ids & set(cached.req_ids):
            self._rewound_req_ids.remove(req_id)
            index = cached.req_ids.index(req_id)
            del cached.req_ids[index], cached.new_block_ids[index]
            del cached.num_computed_tokens[index], cached.num_output_tokens[index]
            block_ids = self.kv_cache_manager.get_block_ids(req_id)
            request = self.requests[req_id]
            scheduler_output.scheduled_new_reqs.append(
                NewRequestData.from_request(request, block_ids, request._all_token_ids.copy())
            )
            assert scheduler_output.preempted_req_ids is not None
            scheduler_output.preempted_req_ids.add(req_id)


def _computed_before(scheduler_output: SchedulerOutput) -> dict[str, int]:
    """Request id -> its computed tokens when the step began, for all requests of the step."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for new in scheduler_output.scheduled_new_reqs:
        computed[new.req_id] = new.num_computed_tokens
    return computed
