# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/async_scheduler.py @ v0.25.0
"""Scheduling one step ahead of the tokens it depends on."""

from __future__ import annotations

from vllmx.core.output import SchedulerOutput
from vllmx.core.scheduler import Scheduler
from vllmx.request import Request, RequestStatus


class AsyncScheduler(Scheduler):
    """Schedules a step while the one before it still runs on the device.

    A token that a step in flight will sample counts as a placeholder: the next step may be
    planned on top of it, and the runner feeds it from the device.
    """

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.is_prefill_chunk:
                continue
            if request.use_structured_output and request.num_output_placeholders > 0:
                # Its bitmask depends on a token that is not known yet.
                scheduler_output.pending_structured_output_tokens = True
            request.num_output_placeholders += 1
        if self.spec_decoding is not None:
            self.spec_decoding.add_placeholders(scheduler_output, self.requests)

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int]
    ) -> tuple[list[int], bool]:
        if request.async_tokens_to_discard > 0:
            # Sampled from a cache that reset_prefix_cache has emptied since.
            request.async_tokens_to_discard -= 1
            return [], False
        was_running = request.status == RequestStatus.RUNNING
        new_token_ids, stopped = super()._update_request_with_output(request, new_token_ids)
        request.num_output_placeholders -= len(new_token_ids)
        assert request.num_output_placeholders >= 0
        num_known = request.num_computed_tokens - request.num_output_placeholders
        if was_running and request.completes_block(num_known, len(new_token_ids)):
            # A block has ended that allocate_slots could not hash: it ended in a placeholder.
            self.kv_cache_manager.cache_blocks(request, num_known)
        return new_token_ids, stopped
