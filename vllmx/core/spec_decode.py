# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py, vllm/v1/spec_decode/dynamic/utils.py @ v0.25.0
"""Speculative decoding as the scheduler sees it: drafted tokens go in, rejected ones come back.

A drafted token is scheduled like any other, so `num_computed_tokens` runs ahead of what is sure.
When the runner's output says how many drafts were right, the rest is taken off again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.core.grammar import keep_valid_tokens
from vllmx.core.output import DraftTokenIds, ModelRunnerOutput, SchedulerOutput
from vllmx.core.schedule_step import ScheduleStep
from vllmx.exceptions import UserError
from vllmx.metrics.stats import SpecDecodingStats
from vllmx.request import Request

if TYPE_CHECKING:
    from vllmx.config import SpeculativeConfig

PLACEHOLDER = -1
"""Stands for a draft that the scheduler does not know; no token has this id."""


class SpecDecoding:
    """The drafts of a scheduler's requests."""

    def __init__(self, config: SpeculativeConfig, max_num_seqs: int) -> None:
        assert config.num_speculative_tokens is not None
        self.num_spec_tokens = config.num_speculative_tokens
        self.use_eagle = config.use_eagle()
        self.num_lookahead_tokens = self._lookahead(config)
        # Drafts a request gets, by the number of requests in the step; None: always as many.
        self.dynamic_sd_lookup: list[int] | None = None
        if config.num_speculative_tokens_per_batch_size is not None:
            self.dynamic_sd_lookup = build_dynamic_sd_schedule_lookup(
                config.num_speculative_tokens_per_batch_size, max_num_seqs, self.num_spec_tokens
            )

    def _lookahead(self, config: SpeculativeConfig) -> int:
        """Slots after the scheduled tokens that the drafter writes to."""
        if config.use_dflash():
            # It fills in a block: one query for the last sampled token besides those to draft.
            return self.num_spec_tokens + 1
        if config.use_eagle() or config.uses_draft_model():
            return self.num_spec_tokens
        return 0  # drafts without a KV cache

    # ------------------------------------------------------------------ schedule

    def take_drafts(self, step: ScheduleStep) -> None:
        """Note which drafts of the running requests are in `step`; those left out are forgotten."""
        for request in step.running_reqs:
            drafts = request.spec_token_ids
            if not drafts:
                continue
            num_scheduled = (
                step.num_scheduled_tokens[request.request_id]
                + request.num_computed_tokens
                - request.num_tokens
                - request.num_output_placeholders
            )
            if num_scheduled > 0:
                step.spec_decode_tokens[request.request_id] = drafts[:num_scheduled]
            request.spec_token_ids = []

    def wants_padding(self, step: ScheduleStep) -> bool:
        """Whether a first decode should look like the others, so that the batch stays uniform.

        Its drafts are then placeholders, which are never accepted.
        """
        return (
            self.dynamic_sd_lookup is None
            and bool(step.running_reqs)
            and not any(request.is_prefill_chunk for request in step.running_reqs)
        )

    def num_spec_tokens_to_schedule(self, num_reqs: int) -> int:
        """Drafts that each of `num_reqs` requests of a step is to get for the next one."""
        if self.dynamic_sd_lookup is None or num_reqs == 0:
            return self.num_spec_tokens
        return self.dynamic_sd_lookup[num_reqs]

    def add_placeholders(
        self, scheduler_output: SchedulerOutput, requests: Mapping[str, Request]
    ) -> None:
        """For a step that is planned before the drafts of this one are known: let every decode
        have some, which the runner puts in."""
        drafts = [PLACEHOLDER] * scheduler_output.num_spec_tokens_to_schedule
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        for req_id in scheduler_output.num_scheduled_tokens:
            request = requests[req_id]
            if not request.is_prefill_chunk:
                request.num_output_placeholders += len(scheduled.get(req_id, ()))
                request.spec_token_ids = drafts

    # ------------------------------------------------------------------ update

    def take_back_rejected(
        self,
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> SpecDecodingStats | None:
        """Take the rejected drafts off what counts as computed; what to report of all drafts.

        A request that ended and one without a token in this step stay as they are.
        """
        stats = SpecDecodingStats.new(self.num_spec_tokens)
        sampled = model_runner_output.sampled_token_ids
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        for req_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            request = requests.get(req_id)
            if request is None or request.is_finished() or not sampled:
                continue
            num_generated = len(sampled[model_runner_output.req_id_to_index[req_id]])
            # What reset_prefix_cache has made void was taken off there already.
            if num_generated == 0 or request.async_tokens_to_discard > 0:
                continue
            num_accepted = num_generated - 1
            num_rejected = len(drafts) - num_accepted
            if request.num_computed_tokens > 0:
                request.num_computed_tokens -= num_rejected
            if request.num_output_placeholders > 0:
                request.num_output_placeholders -= num_rejected
            stats.observe_draft(len(drafts) - invalid.get(req_id, 0), num_accepted)
        return stats if stats.num_drafts else None

    def update_draft_token_ids(
        self, drafts: DraftTokenIds, requests: Mapping[str, Request], manager: Any | None
    ) -> None:
        """Give the requests the drafts for their next step; a piece of a prompt gets none."""
        for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = requests.get(req_id)
            if request is None or request.is_finished():
                continue
            if request.is_prefill_chunk:
                request.spec_token_ids = []
            else:
                request.spec_token_ids = keep_valid_tokens(manager, request, token_ids)

    def update_draft_token_ids_in_output(
        self,
        drafts: DraftTokenIds,
        scheduler_output: SchedulerOutput,
        requests: Mapping[str, Request],
        manager: Any | None,
    ) -> None:
        """Put drafts in the place of the placeholders of a step that is scheduled already.

        Where there are fewer, or a grammar forbids some, placeholders stay, and are counted in
        `num_invalid_spec_tokens`.
        """
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        num_invalid: dict[str, int] = {}
        for req_id, token_ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = requests.get(req_id)
            placeholders = scheduled.get(req_id)
            if request is None or request.is_finished() or not placeholders:
                continue
            valid = keep_valid_tokens(manager, request, token_ids[: len(placeholders)])
            missing = len(placeholders) - len(valid)
            if missing:
                num_invalid[req_id] = missing
            scheduled[req_id] = valid + [PLACEHOLDER] * missing
        scheduler_output.num_invalid_spec_tokens = num_invalid


def build_dynamic_sd_schedule_lookup(
    num_speculative_tokens_per_batch_size: Sequence[Sequence[int]],
    vllm_max_batch_size: int,
    vllm_num_speculative_tokens: int,
) -> list[int]:
    """Entry b: drafts a request gets in a step of b requests, `vllm_num_speculative_tokens` at
    most. Entry 0 means nothing.

    The ranges are (first, last, drafts), both ends included. What is between two of them or after
    the last goes by the range before it. UserError for ranges that overlap or do not begin at 1.
    """
    name = "speculative.num_speculative_tokens_per_batch_size"
    if any(len(entry) != 3 for entry in num_speculative_tokens_per_batch_size):
        raise UserError(f"{name}: each entry must be [first, last, drafts].")
    ranges = sorted(map(list, num_speculative_tokens_per_batch_size))
    if not ranges or ranges[0][0] != 1:
        raise UserError(f"{name}: the first range must start at 1, so that every batch is covered.")
    lookup = [0] * (vllm_max_batch_size + 1)
    last_before = 0
    for first, last, num_tokens in ranges:
        if first > last or first <= last_before or num_tokens < 0:
            raise UserError(
                f"{name}: ({first}, {last}, {num_tokens}) must be a range that begins after "
                f"{last_before}, with 0 or more tokens."
            )
        num_tokens = min(num_tokens, vllm_num_speculative_tokens)
        # To the end: later ranges overwrite what is theirs.
        lookup[first:] = [num_tokens] * len(lookup[first:])
        last_before = last
    return lookup
