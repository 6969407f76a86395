# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/request.py @ v0.25.0
"""A request as the engine core sees it: its tokens, its state and how far it has been computed."""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllmx.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreRequest, FinishReason
from vllmx.metrics.stats import PrefillStats
from vllmx.structured_output.request import StructuredOutputRequest

if TYPE_CHECKING:
    from vllmx.core.block_hash import BlockHash
    from vllmx.lora.request import LoRARequest
    from vllmx.multimodal import MultiModalFeatureSpec
    from vllmx.sampling_params import SamplingParams


class RequestStatus(enum.IntEnum):
    """Where a request is in its life. The order counts: all after PREEMPTED are final."""

    WAITING = enum.auto()
    WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR = enum.auto()
    WAITING_FOR_REMOTE_KVS = enum.auto()
    WAITING_FOR_STREAMING_REQ = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()
    FINISHED_IGNORED = enum.auto()
    FINISHED_ERROR = enum.auto()
    FINISHED_REPETITION = enum.auto()

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether `status` is a final one."""
        return status > RequestStatus.PREEMPTED

    @staticmethod
    def get_finished_reason(status: RequestStatus) -> FinishReason | None:
        """The reason to report for `status`, None while the request lives."""
        return _FINISHED_REASON_MAP.get(status)


# A prompt that can never run is IGNORED, which OpenAI's API calls "length".
_FINISHED_REASON_MAP = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_IGNORED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
    RequestStatus.WAITING_FOR_STREAMING_REQ: FinishReason.STOP,
    RequestStatus.FINISHED_REPETITION: FinishReason.REPETITION,
}


class ConstantList(Sequence[int]):
    """A view of a list that cannot be changed through it, but follows the list as it grows.

    Follows upstream vllm/v1/utils.py.
    """

    __slots__ = ("_items",)

    def __init__(self, items: list[int]) -> None:
        self._items = items

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ConstantList):
            return self._items == other._items
        return self._items == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"ConstantList({self._items})"

    def copy(self) -> list[int]:
        """The items now, as a list of the caller's own."""
        return self._items.copy()


@dataclass
class StreamingUpdate:
    """The next piece of prompt for a session that is in the engine."""

    mm_features: list[MultiModalFeatureSpec] | None
    """Its images and sounds, their offsets counted from its own begin."""
    prompt_token_ids: list[int] | None
    """Its tokens."""
    max_tokens: int
    """Longest answer to it."""
    arrival_time: float
    """Wall-clock seconds at which it came."""
    sampling_params: SamplingParams | None
    """How its answer is sampled."""

    @classmethod
    def from_request(cls, request: Request) -> StreamingUpdate | None:
        """The piece that `request` brings; None if it says that there are no more."""
        if not request.resumable:
            return None
        return cls(
            mm_features=request.mm_features,
            prompt_token_ids=request.prompt_token_ids,
            max_tokens=request.max_tokens,
            arrival_time=request.arrival_time,
            sampling_params=request.sampling_params,
        )


class Request:
    """State of one request from admission to its last token.

    Its tokens are `prompt_token_ids` followed by `output_token_ids`; `all_token_ids` is both. The
    KV cache holds entries for the first `num_computed_tokens` of them.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int] | None,
        sampling_params: SamplingParams | None,
        pooling_params: Any | None,
        client_index: int = 0,
        arrival_time: float | None = None,
        prompt_embeds: Any | None = None,
        prompt_is_token_ids: list[bool] | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        lora_request: LoRARequest | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        block_hasher: Callable[[Request], list[BlockHash]] | None = None,
        resumable: bool = False,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        hash_block_size: int = 1,
        block_hashes: list[BlockHash] | None = None,
    ) -> None:
        """`block_hasher` hashes the blocks that became full since it was last asked; it is asked
        whenever the number of tokens reaches a multiple of `hash_block_size`. `block_hashes`: those
        of the first blocks, if they are known. `resumable`: further pieces of the prompt will come.
        The `reasoning_` arguments tell a grammar where it begins."""
        if sampling_params is None:
            raise ValueError("a request needs sampling_params")
        assert sampling_params.max_tokens is not None
        self.request_id = request_id
        self.client_index = client_index
        self.priority = priority
        self.sampling_params = sampling_params
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.structured_output_request = StructuredOutputRequest.from_sampling_params(
            sampling_params, reasoning_ended, reasoning_parser_kwargs
        )
        self.arrival_time = arrival_time if arrival_time is not None else time.time()
        self.cache_salt = cache_salt
        self.mm_features = mm_features or []
        self.trace_headers = trace_headers
        self.max_tokens = sampling_params.max_tokens
        self.skip_reading_prefix_cache = self.get_skip_reading_prefix_cache()
        # What a KV connector is told of the other side of a transfer.
        self.kv_transfer_params: dict[str, Any] | None = None
        if sampling_params is not None and sampling_params.extra_args:
            self.kv_transfer_params = sampling_params.extra_args.get("kv_transfer_params")

        self.status = RequestStatus.WAITING
        if self.structured_output_request is not None:
            self.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        # Given out once, with the first token.
        self.prefill_stats: PrefillStats | None = PrefillStats()
        self.num_nans_in_logits = 0
        self.num_preemptions = 0

        self.prompt_token_ids = prompt_token_ids
        # [num_prompt_tokens, hidden], an array or tensor. With prompt_token_ids beside it
        # prompt_is_token_ids says which positions are tokens.
        self.prompt_embeds = prompt_embeds
        self.prompt_is_token_ids = prompt_is_token_ids
        # SHA-256 of rows [start, end) of prompt_embeds, of the blocks that were hashed.
        self.prompt_embeds_hashes: dict[tuple[int, int], bytes] = {}
        self.num_prompt_tokens = _prompt_length(prompt_token_ids, prompt_embeds)
        self._output_token_ids: list[int] = []
        # Embeddings have no token; 0 stands for them.
        self._all_token_ids: list[int] = (
            [0] * self.num_prompt_tokens if prompt_token_ids is None else prompt_token_ids.copy()
        )
        self.output_token_ids = ConstantList(self._output_token_ids)
        self.all_token_ids = ConstantList(self._all_token_ids)
        self.num_computed_tokens = 0
        # Whether the step it was last scheduled in leaves known tokens uncomputed.
        self.is_prefill_chunk = False
        # Tokens a step in flight will bring (async scheduling), and how many of those to drop.
        self.num_output_placeholders = 0
        self.async_tokens_to_discard = 0
        # The last step it was in, where frees wait for steps in flight (`defer_block_free`).
        self.last_sched_seq = 0
        # Drafts for its next step.
        self.spec_token_ids: list[int] = []

        self.resumable = resumable
        # Pieces of a session's prompt that came before it had stopped; None: there are no more.
        self.streaming_queue: deque[StreamingUpdate | None] | None = None

        self.block_hashes: list[BlockHash] = list(block_hashes or ())
        self._hash_block_size = hash_block_size
        self._block_hasher = block_hasher
        self.update_block_hashes()

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: Callable[[Request], list[BlockHash]] | None,
        hash_block_size: int = 1,
    ) -> Request:
        """Build the engine core's state from the front end's message."""
        return cls(
            request_id=request.request_id,
            client_index=request.client_index,
            prompt_token_ids=request.prompt_token_ids,
            prompt_embeds=request.prompt_embeds,
            prompt_is_token_ids=request.prompt_is_token_ids,
            mm_features=request.mm_features,
            sampling_params=request.sampling_params,
            pooling_params=request.pooling_params,
            arrival_time=request.arrival_time,
            lora_request=request.lora_request,
            cache_salt=request.cache_salt,
            priority=request.priority,
            trace_headers=request.trace_headers,
            block_hasher=block_hasher,
            resumable=request.resumable,
            reasoning_ended=request.reasoning_ended,
            reasoning_parser_kwargs=request.reasoning_parser_kwargs,
            hash_block_size=hash_block_size,
            block_hashes=request.block_hashes,
        )

    def append_output_token_ids(self, token_ids: int | list[int]) -> None:
        """Add generated tokens and hash the blocks they complete."""
        if isinstance(token_ids, int):
            self._output_token_ids.append(token_ids)
            self._all_token_ids.append(token_ids)
            if len(self._all_token_ids) % self._hash_block_size:
                return
        else:
            self._output_token_ids.extend(token_ids)
            self._all_token_ids.extend(token_ids)
        self.update_block_hashes()

    def update_block_hashes(self) -> None:
        """Hash the blocks that are full and have no hash yet."""
        if self._block_hasher is not None:
            self.block_hashes.extend(self._block_hasher(self))

    def completes_block(self, num_tokens: int, num_new_tokens: int) -> bool:
        """Whether a block that is hashed ends at one of the last `num_new_tokens` of its first
        `num_tokens` tokens."""
        return num_tokens % self._hash_block_size < num_new_tokens

    @property
    def use_structured_output(self) -> bool:
        """Whether a grammar constrains the output."""
        return self.structured_output_request is not None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self._all_token_ids)

    @property
    def num_tokens_with_spec(self) -> int:
        """The same with the drafts for the next step."""
        return len(self._all_token_ids) + len(self.spec_token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self._output_token_ids)

    @property
    def num_encoder_inputs(self) -> int:
        """Images, sounds and the like in the prompt."""
        return len(self.mm_features)

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether the prompt holds images or sound."""
        return bool(self.mm_features)

    def get_num_encoder_embeds(self, input_id: int) -> int:
        """Embeddings that the encoder makes of item `input_id`."""
        return self.mm_features[input_id].mm_position.get_num_embeds()

    def get_skip_reading_prefix_cache(self) -> bool:
        """Whether every prompt token must be computed (prompt log-probabilities need that)."""
        return bool(self.sampling_params.skip_reading_prefix_cache)

    def is_finished(self) -> bool:
        """Whether the request has reached a final state."""
        return RequestStatus.is_finished(self.status)

    def get_finished_reason(self) -> FinishReason | None:
        """Why it ended, None while it lives."""
        return RequestStatus.get_finished_reason(self.status)

    def record_event(self, event_type: EngineCoreEventType, timestamp: float | None = None) -> None:
        """Note that something happened, now or at monotonic `timestamp`."""
        self.events.append(EngineCoreEvent.new_event(event_type, timestamp))

    def take_events(self) -> list[EngineCoreEvent] | None:
        """The events since the last call, None if there are none."""
        if not self.events:
            return None
        events, self.events = self.events, []
        return events

    def take_prefill_stats(self) -> PrefillStats | None:
        """The statistics of the first prefill; None from the second call on."""
        prefill_stats, self.prefill_stats = self.prefill_stats, None
        return prefill_stats

    def __lt__(self, other: Request) -> bool:
        """Order of priority scheduling: lower priority value first, then earlier arrival."""
        return self.sort_key < other.sort_key

    @property
    def sort_key(self) -> tuple[int, float, str, int]:
        """What priority scheduling orders by."""
        return self.priority, self.arrival_time, self.request_id, id(self)


def _prompt_length(prompt_token_ids: list[int] | None, prompt_embeds: Any | None) -> int:
    """Tokens of a prompt given as ids, embeddings or both; ValueError if they do not agree."""
    lengths = {len(given) for given in (prompt_token_ids, prompt_embeds) if given is not None}
    if not lengths:
        raise ValueError("a request needs prompt_token_ids or prompt_embeds")
    if len(lengths) > 1:
        assert prompt_token_ids is not None and prompt_embeds is not None
        raise ValueError(
            "Prompt token ids and prompt embeds had different lengths: "
            f"{len(prompt_token_ids)} and {len(prompt_embeds)}"
        )
    return lengths.pop()
