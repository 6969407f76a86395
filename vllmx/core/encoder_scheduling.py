# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""The scheduler's part in encoder inputs: which images and sounds a step encodes or fetches.

An item is encoded as a whole, in the step that reaches the first token that takes one of its
embeddings. It has to fit what a step may encode and what the runner's cache holds; if it does not,
the request's tokens of this step end where the item begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllmx.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)
from vllmx.core.schedule_step import Admission, CachedPrefix, EncoderPlan, ScheduleStep
from vllmx.ec_transfer.base import ECConnectorBase, ECConnectorRole
from vllmx.ec_transfer.factory import ECConnectorFactory
from vllmx.exceptions import UserError
from vllmx.multimodal import get_mm_features_in_window, total_num_embeds
from vllmx.request import Request

if TYPE_CHECKING:
    from vllmx.config import SchedulerConfig, VllmConfig


class EncoderScheduling:
    """Mixed into the scheduler; where the model takes text alone `max_num_encoder_input_tokens` is
    0 and nothing here runs in a step."""

    vllm_config: VllmConfig
    scheduler_config: SchedulerConfig
    requests: dict[str, Request]
    use_eagle: bool
    encoder_cache_manager: EncoderCacheManager

    is_encoder_decoder = False
    max_num_encoder_input_tokens = 0
    """Embeddings that a step may compute."""
    ec_connector: ECConnectorBase | None = None

    def _init_encoder_inputs(self) -> None:
        """Settle how much is encoded and kept; UserError if no step has room for an item."""
        model_config = self.vllm_config.model_config
        self.is_encoder_decoder = model_config.is_encoder_decoder
        self.max_num_encoder_input_tokens, cache_size = compute_mm_encoder_budget(
            self.scheduler_config, model_config.mm_max_toks_per_item
        )
        manager_cls = EncoderDecoderCacheManager if self.is_encoder_decoder else EncoderCacheManager
        self.encoder_cache_manager = manager_cls(cache_size)
        if self.is_encoder_decoder and len(model_config.mm_max_toks_per_item) != 1:
            raise UserError("An encoder-decoder model must take items of one modality.")
        if self.vllm_config.ec_transfer_config is not None:
            self.ec_connector = ECConnectorFactory.create_connector(
                self.vllm_config, ECConnectorRole.SCHEDULER
            )

    def _check_encoder_inputs(self, request: Request) -> None:
        """ValueError for items that no step could ever take, so that the request would hang."""
        limit = min(self.max_num_encoder_input_tokens, self.encoder_cache_manager.cache_size)
        num_embeds = [request.get_num_encoder_embeds(i) for i in range(len(request.mm_features))]
        # A decoder that attends to the encoder needs all items in its first step.
        largest = sum(num_embeds) if self.is_encoder_decoder else max(num_embeds)
        if largest > limit:
            raise ValueError(
                f"Request {request.request_id}: an encoder input of {largest} embeddings exceeds "
                f"the pre-allocated encoder cache size {limit}. Send a smaller one, or raise "
                "scheduler.max_num_batched_tokens."
            )

    # ------------------------------------------------------------------ schedule

    def _has_encoder_inputs_ready(self, request: Request, prefix: CachedPrefix) -> bool:
        """Whether a waiting request need not wait for outputs that the connector is fetching."""
        assert self.ec_connector is not None
        if not request.mm_features or prefix.num_own_tokens > 0:
            return True
        return self.ec_connector.ensure_cache_available(request, prefix.num_tokens)

    def _plan_encoder_inputs(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, step: ScheduleStep
    ) -> int:
        """Plan what the request needs for `num_new_tokens` after `num_computed_tokens`; returns for
        how many of them it can be had.

        Items in the cache are held by the request from now on. Others are allocated by
        `_allocate_encoder_inputs`, once the tokens have their slots.
        """
        if num_new_tokens <= 0 or (self.is_encoder_decoder and num_computed_tokens > 0):
            return num_new_tokens
        plan = self._make_encoder_plan(
            request, num_computed_tokens, num_new_tokens, step.encoder_budget
        )
        step.encoder_plans[request.request_id] = plan
        return plan.num_new_tokens

    def _make_encoder_plan(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, budget: int
    ) -> EncoderPlan:
        """The plan, with `budget` embeddings that the step may still encode."""
        plan = EncoderPlan(num_new_tokens)
        manager, connector = self.encoder_cache_manager, self.ec_connector
        # A drafter that reads one token ahead needs the items in its reach as well.
        shift = int(self.use_eagle)
        first, end = get_mm_features_in_window(
            request.mm_features, num_computed_tokens, num_computed_tokens + num_new_tokens + shift
        )
        planned: set[str] = set()
        num_planned_embeds = 0
        for i in range(0 if self.is_encoder_decoder else first, end):
            feature = request.mm_features[i]
            if feature.identifier in planned and not self.is_encoder_decoder:
                continue  # it comes twice
            if manager.check_and_update_cache(request, i):
                continue
            if self._splits_item(
                request, i, num_computed_tokens, plan.num_new_tokens
            ) or not manager.can_allocate(request, i, budget - plan.num_embeds, num_planned_embeds):
                before = feature.mm_position.offset - num_computed_tokens - shift
                plan.num_new_tokens = max(0, before)
                break
            if not self._takes_embeds(request, i, num_computed_tokens, plan.num_new_tokens):
                continue
            num_embeds = request.get_num_encoder_embeds(i)
            num_planned_embeds += num_embeds
            planned.add(feature.identifier)
            if connector is not None and connector.has_cache_item(feature.identifier):
                plan.to_load.append(i)
            else:
                plan.to_compute.append(i)
                plan.num_embeds += num_embeds
        return plan

    def _splits_item(self, request: Request, index: int, num_computed: int, num_new: int) -> bool:
        """Whether the tokens would end within item `index` though items must not be split.

        An item that is too long for any step is split all the same, from its first token on.
        """
        position = request.mm_features[index].mm_position
        return (
            self.scheduler_config.disable_chunked_mm_input
            and num_computed < position.offset
            and num_computed + num_new < position.offset + position.length
        )

    @staticmethod
    def _takes_embeds(request: Request, index: int, num_computed: int, num_new: int) -> bool:
        """Whether one of the tokens takes an embedding of item `index`; some of it may be text."""
        position = request.mm_features[index].mm_position
        start, end = position.get_embeds_indices_in_range(
            max(0, num_computed - position.offset),
            min(position.length, num_computed + num_new - position.offset),
        )
        return start < end

    def _allocate_encoder_inputs(self, request: Request, step: ScheduleStep) -> None:
        """Carry out what was planned for a request that has its slots."""
        plan = step.encoder_plans.pop(request.request_id, None)
        if plan is None:
            return
        if plan.to_compute:
            step.encoder_inputs.setdefault(request.request_id, []).extend(plan.to_compute)
            step.encoder_budget -= plan.num_embeds
        for i in (*plan.to_compute, *plan.to_load):
            self.encoder_cache_manager.allocate(request, i)
            if self.ec_connector is not None:
                self.ec_connector.update_state_after_alloc(request, i)

    def _num_cross_attention_tokens(self, request: Request, step: ScheduleStep) -> int:
        """Encoder positions that the request's cross attention needs slots for."""
        if not self.is_encoder_decoder or request.request_id not in step.encoder_plans:
            return 0
        plan = step.encoder_plans[request.request_id]
        return total_num_embeds(request.mm_features[i] for i in plan.to_compute)

    def _stays_waiting(self, request: Request, step: ScheduleStep) -> Admission:
        """There is no room for a request; it must not keep others from the cache meanwhile."""
        step.encoder_plans.pop(request.request_id, None)
        self.encoder_cache_manager.free(request)
        return Admission.NO_ROOM

    def _take_back_encoder_inputs(self, victim: Request, step: ScheduleStep) -> None:
        """`victim` lost its place in `step`, or will not get one: it encodes nothing.

        If others in the step count on what it was to encode, the first of them does it instead.
        Else it must not be found in the cache.
        """
        step.encoder_plans.pop(victim.request_id, None)
        manager = self.encoder_cache_manager
        for i in step.encoder_inputs.pop(victim.request_id, ()):
            identifier = victim.mm_features[i].identifier
            holders = set(manager.take_back(victim, i))
            # The last one is the request that needs the room.
            in_step = [*(request.request_id for request in step.running_reqs), *step.encoder_plans]
            heir = next((req_id for req_id in in_step if req_id in holders), None)
            if heir is not None:
                index = self._held_index(self.requests[heir], identifier)
                step.encoder_inputs.setdefault(heir, []).append(index)
                continue
            step.encoder_budget += victim.get_num_encoder_embeds(i)
            for req_id in holders:
                holder = self.requests[req_id]
                manager.take_back(holder, self._held_index(holder, identifier))

    def _held_index(self, request: Request, identifier: str) -> int:
        """Index of the item called `identifier` that the request holds."""
        held = self.encoder_cache_manager.get_cached_input_ids(request)
        return min(i for i in held if request.mm_features[i].identifier == identifier)

    # ------------------------------------------------------------------ update

    def _free_computed_encoder_inputs(self, num_scheduled_tokens: dict[str, int]) -> None:
        """After a step: its requests give up the items that they have passed."""
        holders = self.encoder_cache_manager.request_cached_ids
        for req_id in [req_id for req_id in holders if req_id in num_scheduled_tokens]:
            self._free_encoder_inputs(self.requests[req_id])

    def _free_encoder_inputs(self, request: Request) -> None:
        """Give up the items whose tokens are in the KV cache for good."""
        manager = self.encoder_cache_manager
        # Tokens of steps in flight may be rejected, and a drafter reads one token behind.
        confirmed = request.num_computed_tokens - request.num_output_placeholders
        confirmed -= int(self.use_eagle)
        for i in list(manager.get_cached_input_ids(request)):
            position = request.mm_features[i].mm_position
            if self.is_encoder_decoder:
                # Its first step has written the cross-attention entries.
                passed = request.num_computed_tokens > 0
            else:
                passed = position.offset + position.length <= confirmed
            if passed:
                manager.free_encoder_input(request, i)

    def reset_encoder_cache(self) -> None:
        """Forget all encoder outputs, as after a change of weights."""
        self.encoder_cache_manager.reset()
