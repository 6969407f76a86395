# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/engine/__init__.py @ v0.25.0
"""The messages between a front end and the engine core.

They are msgspec structs, for they cross a process border: msgspec reads their annotations when it
makes a decoder, so what they name is imported here. Importing this package loads none of its
modules, no torch and no front end.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from vllmx.core.output import LogprobsLists
from vllmx.lora.request import LoRARequest
from vllmx.metrics.stats import PrefillStats, SchedulerStats
from vllmx.sampling_params import SamplingParams

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does with the requests in flight: end them, let them finish, or freeze them."""

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")
"""`finish_reason` as users see it, in the order of FinishReason."""


class FinishReason(enum.IntEnum):
    """Why a request ended; `str()` gives the word that users see."""

    STOP = 0
    """End of sequence, a stop token or a stop string."""
    LENGTH = 1
    """max_tokens, max_model_len, or no room left in the KV cache."""
    ABORT = 2
    """Cancelled by the client or by a shutdown."""
    ERROR = 3
    """A fault inside the engine that concerns this request alone."""
    REPETITION = 4
    """The same tokens over and over."""

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


@dataclass
class EngineCoreReadyResponse:
    """What an engine core that has started tells each front end: values it has filled in."""

    max_model_len: int
    """Longest request in tokens, lowered where the KV cache is small."""
    num_gpu_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens in a block."""
    dp_stats_address: str | None
    """Where a data-parallel engine publishes its load."""
    dtype: str
    """Activation dtype as configured."""
    vllm_version: str
    """Version of vllmx."""
    world_size: int
    """Workers of the engine."""
    data_parallel_size: int
    """Copies of the engine."""
    kv_cache_size_tokens: int | None = None
    """Tokens the KV cache holds; None without a cache."""
    kv_cache_max_concurrency: float | None = None
    """Requests of full length that fit; None without a cache."""


class EngineCoreRequest(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A validated, tokenized request on its way to the engine core."""

    request_id: str
    prompt_token_ids: list[int] | None
    mm_features: list[Any] | None
    sampling_params: SamplingParams | None
    pooling_params: Any | None
    arrival_time: float
    lora_request: LoRARequest | None
    cache_salt: str | None
    data_parallel_rank: int | None
    prompt_embeds: Any | None = None
    prompt_is_token_ids: list[bool] | None = None
    # Which front end gets the outputs, where there are several.
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Mapping[str, str] | None = None
    resumable: bool = False
    # The id the user gave; request_id is made unique from it.
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: dict[str, Any] | None = None
    abort_immediately: bool = False
    # Of the prompt's full blocks, once the engine core has hashed them.
    block_hashes: list[Any] | None = None

    @property
    def params(self) -> SamplingParams | Any:
        """The sampling parameters, or the pooling ones where there are none."""
        if self.sampling_params is not None:
            return self.sampling_params
        assert self.pooling_params is not None
        return self.pooling_params


class EngineCoreEventType(enum.IntEnum):
    """What happened to a request inside the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct):
    """Something that happened to a request, with the monotonic time of the engine core."""

    type: EngineCoreEventType
    timestamp: float

    @classmethod
    def new_event(
        cls, event_type: EngineCoreEventType, timestamp: float | None = None
    ) -> EngineCoreEvent:
        """An event of now, or of `timestamp` seconds on the monotonic clock."""
        return cls(event_type, time.monotonic() if timestamp is None else timestamp)


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one request."""

    request_id: str
    new_token_ids: list[int]
    new_logprobs: LogprobsLists | None = None
    new_prompt_logprobs_tensors: LogprobsLists | None = None
    pooling_output: Any | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    events: list[EngineCoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: Mapping[str, str] | None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: Any | None = None
    # More than 0: the logits were corrupted.
    num_nans_in_logits: int = 0

    @property
    def finished(self) -> bool:
        """Whether this is the request's last output."""
        return self.finish_reason is not None


class UtilityResult:
    """What a utility call returned; serial_utils encodes it with its types where it may."""

    def __init__(self, r: Any = None) -> None:
        self.result = r


class UtilityOutput(msgspec.Struct, array_like=True, gc=False):
    """Answer to a utility call; a failure_message means that it failed and has no result."""

    call_id: int
    failure_message: str | None = None
    result: UtilityResult | None = None


class EngineCoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one step brought for one front end; `timestamp` is monotonic seconds."""

    engine_index: int = 0
    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: set[str] | None = None

    def __post_init__(self) -> None:
        if self.timestamp == 0.0:
            self.timestamp = time.monotonic()


class EngineCoreRequestType(enum.Enum):
    """First byte of a message to the engine core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    UTILITY = b"\x03"
    EXECUTOR_FAILED = b"\x04"
    # Carries nothing: it only ends a blocking read of the input queue.
    WAKEUP = b"\x05"
