# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/sched/scheduler.py @ v0.25.0
"""The step that `Scheduler.schedule` puts together, and how it is written down for the runner."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllmx.core.kv_cache_manager import KVCacheBlocks
from vllmx.core.output import CachedRequestData, NewRequestData
from vllmx.request import Request


class Admission(enum.Enum):
    """What became of a waiting request whose turn it was."""

    ADMITTED = enum.auto()
    """It runs."""
    SET_ASIDE = enum.auto()
    """It waits for something of its own, so the next one has its turn."""
    FAILED = enum.auto()
    """What it waited for will not come."""
    NO_ROOM = enum.auto()
    """It waits for tokens or blocks, and so do all behind it."""


@dataclass(slots=True)
class EncoderPlan:
    """What a request needs of the encoder for its tokens of a step; nothing is allocated yet."""

    num_new_tokens: int
    """Tokens that can be computed with it."""
    to_compute: list[int] = field(default_factory=list)
    """Indices of the items to encode."""
    num_embeds: int = 0
    """Their embeddings."""
    to_load: list[int] = field(default_factory=list)
    """Indices of those that the connector fetches."""


@dataclass(slots=True)
class CachedPrefix:
    """The part of a waiting request that need not be computed."""

    blocks: KVCacheBlocks
    """Blocks found in the prefix cache, with `num_local_tokens` in them."""
    num_local_tokens: int
    num_own_tokens: int = 0
    """Tokens in blocks that the request holds already."""
    num_external_tokens: int = 0
    """Tokens whose entries come from outside."""
    load_async: bool = False
    """Whether those come while others compute, so that the request has to wait for them."""

    @property
    def num_tokens(self) -> int:
        """Length of the prefix."""
        return self.num_own_tokens + self.num_local_tokens + self.num_external_tokens


@dataclass(slots=True)
class ScheduleStep:
    """The decisions of the step that is being put together."""

    token_budget: int
    """Tokens that are still to be handed out."""
    timestamp: float
    """Monotonic seconds at its begin."""
    encoder_budget: int = 0
    """Embeddings that the encoders may still compute; 0 from the start where there are none."""
    defer_prefills: bool = False
    """Whether prompts have to wait for another step."""
    index: int = 0
    """Position in the running list of the request that is looked at next."""
    preempted: bool = False
    """Whether a request had to give its blocks back."""
    new_reqs: list[Request] = field(default_factory=list)
    resumed_reqs: list[Request] = field(default_factory=list)
    running_reqs: list[Request] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    """Drafted tokens included."""
    new_blocks: dict[str, KVCacheBlocks] = field(default_factory=dict)
    """Only of the requests that got blocks in this step."""
    spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    """The drafted tokens to verify."""
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    """Indices of the items to encode, for each request that has any."""
    encoder_plans: dict[str, EncoderPlan] = field(default_factory=dict)
    """What requests need of the encoder whose tokens have no slots yet."""
    lora_ids: set[int] | None = None
    """Adapters of the requests in it, once somebody has asked for them."""

    def add_admitted(
        self, request: Request, num_new_tokens: int, blocks: KVCacheBlocks, is_new: bool
    ) -> None:
        """Take in a request that starts (`is_new`) or resumes; `blocks` are all that it holds."""
        (self.new_reqs if is_new else self.resumed_reqs).append(request)
        self.new_blocks[request.request_id] = blocks
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        if self.lora_ids is not None and request.lora_request is not None:
            self.lora_ids.add(request.lora_request.lora_int_id)

    def has_lora_slot(self, request: Request, max_loras: int) -> bool:
        """Whether the adapter of a waiting request, if it has one, can be among the `max_loras` of
        this step."""
        if request.lora_request is None:
            return True
        if self.lora_ids is None:
            # Nothing but running requests up to here, or requests without an adapter.
            loras = (running.lora_request for running in self.running_reqs)
            self.lora_ids = {lora.lora_int_id for lora in loras if lora is not None}
        return request.lora_request.lora_int_id in self.lora_ids or len(self.lora_ids) < max_loras

    def remove_running(self, request: Request) -> bool:
        """Take back what a running request was given; False if that is nothing."""
        req_id = request.request_id
        if req_id not in self.num_scheduled_tokens:
            return False
        self.running_reqs.remove(request)
        self.token_budget += self.num_scheduled_tokens.pop(req_id)
        self.new_blocks.pop(req_id, None)
        return True

    def new_request_data(self) -> list[NewRequestData]:
        """The requests that the runner does not hold.

        A resumed request goes as a new one, its output tokens as part of the prefill.
        """
        return [
            NewRequestData.from_request(
                request,
                self.new_blocks[request.request_id].get_block_ids(),
                request._all_token_ids.copy(),
            )
            for request in (*self.new_reqs, *self.resumed_reqs)
        ]

    def cached_request_data(self) -> CachedRequestData:
        """What changes for the requests that the runner holds."""
        reqs = self.running_reqs
        req_ids = [request.request_id for request in reqs]
        new_block_ids: list[tuple[list[int], ...] | None] = [None] * len(reqs)
        if len(self.new_blocks) > len(self.new_reqs) + len(self.resumed_reqs):
            for i, req_id in enumerate(req_ids):
                if (blocks := self.new_blocks.get(req_id)) is not None:
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
