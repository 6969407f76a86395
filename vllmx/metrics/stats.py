# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/metrics/stats.py @ v0.25.0
"""Numbers that the engine reports about itself, gathered where they arise.

The scheduler fills `SchedulerStats` once a step, the output processor `IterationStats`; loggers
and /metrics only read them. Times are seconds: `*_ts` on the monotonic clock of the engine core,
`arrival_time` and `iteration_timestamp` on the wall clock of the front end.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllmx.engine import EngineCoreEvent, EngineCoreOutput, FinishReason


@dataclass
class BaseCacheStats:
    """Look-ups in a cache and how many were answered, since the last report."""

    reset: bool = False
    """The cache was emptied since the last report."""
    requests: int = 0
    """Requests that looked something up."""
    queries: int = 0
    """Items they looked up."""
    hits: int = 0
    """Items they found."""


class CachingMetrics:
    """Hit rate over the most recent `max_recent_requests` requests."""

    def __init__(self, max_recent_requests: int = 1000) -> None:
        self.max_recent_requests = max_recent_requests
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self.query_queue: deque[tuple[int, int, int]] = deque()

    def observe(self, stats: BaseCacheStats) -> None:
        """Add one report and let the oldest ones go that the window no longer holds."""
        if stats.reset:
            self.reset()
        if stats.requests == 0:
            return
        self._add((stats.requests, stats.queries, stats.hits), sign=1)
        self.query_queue.append((stats.requests, stats.queries, stats.hits))
        # The newest report stays even if it is larger than the window by itself.
        while len(self.query_queue) > 1 and self.aggregated_requests > self.max_recent_requests:
            self._add(self.query_queue.popleft(), sign=-1)

    def _add(self, report: tuple[int, int, int], sign: int) -> None:
        self.aggregated_requests += sign * report[0]
        self.aggregated_query_total += sign * report[1]
        self.aggregated_query_hit += sign * report[2]

    def reset(self) -> None:
        """Forget everything seen so far."""
        self.aggregated_requests = 0
        self.aggregated_query_total = 0
        self.aggregated_query_hit = 0
        self.query_queue.clear()

    @property
    def empty(self) -> bool:
        """Whether no request has been observed."""
        return self.aggregated_requests == 0

    @property
    def hit_rate(self) -> float:
        """Share of the queries that hit, 0.0 to 1.0; 0.0 where nothing was asked."""
        if self.aggregated_query_total == 0:
            return 0.0
        return self.aggregated_query_hit / self.aggregated_query_total


@dataclass
class PrefixCacheStats(BaseCacheStats):
    """Prefix-cache look-ups; queries and hits count tokens.

    A request that was preempted finds its own blocks again, which says nothing about how much
    prompts have in common: such look-ups are counted apart.
    """

    preempted_requests: int = 0
    """Requests that looked up again after a preemption."""
    preempted_queries: int = 0
    """Tokens those looked up."""
    preempted_hits: int = 0
    """Tokens those found."""

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        """Count one request that looked up `num_tokens` tokens and found `num_hits`."""
        if preempted:
            self.preempted_requests += 1
            self.preempted_queries += num_tokens
            self.preempted_hits += num_hits
        else:
            self.requests += 1
            self.queries += num_tokens
            self.hits += num_hits


@dataclass
class KVCacheEvictionEvent:
    """Life of one sampled block that left the prefix cache."""

    lifetime_seconds: float
    """From its first use to its eviction."""
    idle_seconds: float
    """From its last use to its eviction."""
    reuse_gaps_seconds: tuple[float, ...]
    """Between one use and the next."""


@dataclass
class SpecDecodingStats:
    """Drafted tokens of one step, and how many of them were right."""

    num_spec_tokens: int
    """Most drafts of a request."""
    num_drafts: int = 0
    """Requests with drafts."""
    num_draft_tokens: int = 0
    """Drafted tokens."""
    num_accepted_tokens: int = 0
    """Drafted tokens that were right."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    """The same by their position among the drafts of a request."""
    num_draft_tokens_per_pos: list[int] = field(default_factory=list)
    """Drafted tokens by position."""

    @classmethod
    def new(cls, num_spec_tokens: int) -> SpecDecodingStats:
        """Nothing drafted yet, `num_spec_tokens` a request at most."""
        zeros = [0] * num_spec_tokens
        return cls(
            num_spec_tokens,
            num_accepted_tokens_per_pos=zeros,
            num_draft_tokens_per_pos=zeros.copy(),
        )

    def observe_draft(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count the drafts of one request."""
        assert num_accepted_tokens <= self.num_spec_tokens
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for position in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[position] += 1
        for position in range(num_draft_tokens):
            self.num_draft_tokens_per_pos[position] += 1


@dataclass
class SchedulerStats:
    """State of the scheduler after a step."""

    num_running_reqs: int = 0
    """Requests in the running batch."""
    num_waiting_reqs: int = 0
    """Requests in the waiting queue."""
    num_skipped_waiting_reqs: int = 0
    """Requests that wait for something other than their turn."""
    step_counter: int = 0
    """Step of a data-parallel engine."""
    current_wave: int = 0
    """Wave of a data-parallel engine."""
    kv_cache_usage: float = 0.0
    """Share of the KV blocks in use, 0.0 to 1.0."""
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    """Prefix-cache look-ups since the last report."""
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    """Look-ups in a KV connector's cache since the last report; None without a connector."""
    kv_cache_eviction_events: list[KVCacheEvictionEvent] = field(default_factory=list)
    """Sampled evictions since the last report."""
    spec_decoding_stats: SpecDecodingStats | None = None
    """Drafts that this step verified."""
    cudagraph_stats: Any | None = None
    """What the runner says about its graphs."""
    kv_connector_stats: dict[str, Any] | None = None
    """What a KV connector counted in this step (KVConnectorStats.data)."""


@dataclass
class RequestStateStats:
    """What is remembered of a request from one output to the next."""

    num_generation_tokens: int = 0
    """Tokens generated so far."""
    arrival_time: float = 0.0
    """Wall clock of the front end."""
    queued_ts: float = 0.0
    """The scheduler took it."""
    scheduled_ts: float = 0.0
    """It was scheduled for the first time."""
    first_token_ts: float = 0.0
    """Its first token came out."""
    last_token_ts: float = 0.0
    """Its latest token came out."""
    first_token_latency: float = 0.0
    """Seconds from arrival to the first token."""
    is_corrupted: bool = False
    """Its logits held NaNs."""


@dataclass
class FinishedRequestStats:
    """Summary of a request that is done; intervals in seconds."""

    finish_reason: FinishReason
    """Why it ended."""
    request_id: str | None = None
    """Whose summary this is."""
    e2e_latency: float = 0.0
    """Arrival to end."""
    num_prompt_tokens: int = 0
    """Length of its prompt."""
    num_generation_tokens: int = 0
    """Length of its answer."""
    max_tokens_param: int | None = None
    """Length it asked for."""
    queued_time: float = 0.0
    """Queued to first scheduled."""
    prefill_time: float = 0.0
    """First scheduled to first token, preemptions included."""
    inference_time: float = 0.0
    """First scheduled to last token."""
    decode_time: float = 0.0
    """First token to last token."""
    mean_time_per_output_token: float = 0.0
    """Decode time over the tokens after the first."""
    is_corrupted: bool = False
    """Its logits held NaNs."""
    num_cached_tokens: int = 0
    """Prompt tokens that came from a cache."""


@dataclass
class PrefillStats:
    """Where a prompt's tokens came from when it was first scheduled."""

    num_prompt_tokens: int = 0
    """Tokens of the prompt."""
    num_computed_tokens: int = 0
    """Tokens that had to be computed."""
    num_cached_tokens: int = 0
    """Tokens that did not."""
    num_local_cached_tokens: int = 0
    """Tokens from the prefix cache."""
    num_external_cached_tokens: int = 0
    """Tokens from another engine's cache."""

    def set(
        self,
        num_prompt_tokens: int,
        num_local_cached_tokens: int,
        num_external_cached_tokens: int,
    ) -> None:
        """Fill every field from the three that are known at admission."""
        num_cached_tokens = num_local_cached_tokens + num_external_cached_tokens
        assert num_cached_tokens <= num_prompt_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_computed_tokens = num_prompt_tokens - num_cached_tokens
        self.num_cached_tokens = num_cached_tokens
        self.num_local_cached_tokens = num_local_cached_tokens
        self.num_external_cached_tokens = num_external_cached_tokens


@dataclass
class PromptTokenStats:
    """Prompt tokens of one iteration by source; the sources add up to `total`."""

    ALL_SOURCES: tuple[str, ...] = ("local_compute", "local_cache_hit", "external_kv_transfer")
    """Labels under which the sources are reported."""
    computed: int = 0
    """Computed here."""
    local_cache_hit: int = 0
    """From the prefix cache."""
    external_kv_transfer: int = 0
    """From another engine."""
    cached_tokens: int = 0
    """From either cache."""
    total: int = 0
    """All of them."""

    def update_from_output(self, prefill_stats: PrefillStats) -> None:
        """Add one finished prefill."""
        self.computed += prefill_stats.num_computed_tokens
        self.cached_tokens += prefill_stats.num_cached_tokens
        self.total += prefill_stats.num_prompt_tokens
        self.local_cache_hit += prefill_stats.num_local_cached_tokens
        self.external_kv_transfer += prefill_stats.num_external_cached_tokens

    def get_by_source(self, source: str) -> int:
        """Tokens that came from `source`, one of ALL_SOURCES."""
        counts = {
            "local_compute": self.computed,
            "local_cache_hit": self.local_cache_hit,
            "external_kv_transfer": self.external_kv_transfer,
        }
        if source not in counts:
            raise ValueError(f"Unknown source: {source}. Choose one of {', '.join(counts)}.")
        return counts[source]


class IterationStats:
    """What one batch of engine outputs brought, over all its requests."""

    def __init__(self) -> None:
        self.iteration_timestamp = time.time()
        self.num_generation_tokens = 0
        self.prompt_token_stats = PromptTokenStats()
        self.num_preempted_reqs = 0
        self.finished_requests: list[FinishedRequestStats] = []
        self.max_num_generation_tokens_iter: list[int] = []
        self.n_params_iter: list[int] = []
        self.time_to_first_tokens_iter: list[float] = []
        self.inter_token_latencies_iter: list[float] = []
        self.num_corrupted_reqs = 0

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items())
        return f"{type(self).__name__}({fields})"

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the requests whose prefill ended here."""
        return self.prompt_token_stats.total

    def _time_since(self, start: float) -> float:
        return self.iteration_timestamp - start

    def update_from_output(
        self,
        output: EngineCoreOutput,
        engine_core_timestamp: float,
        is_prefilling: bool,
        req_stats: RequestStateStats,
    ) -> None:
        """Add one request's output; `is_prefilling` if it is the request's first.

        Call it before the request itself leaves the prefilling state.
        """
        num_new_tokens = len(output.new_token_ids)
        self.num_generation_tokens += num_new_tokens
        req_stats.num_generation_tokens += num_new_tokens
        if output.num_nans_in_logits > 0:
            req_stats.is_corrupted = True
        if output.events is not None:
            self.update_from_events(output.events, req_stats)
        if is_prefilling:
            if output.prefill_stats is not None:
                self.prompt_token_stats.update_from_output(output.prefill_stats)
            req_stats.first_token_latency = self._time_since(req_stats.arrival_time)
            self.time_to_first_tokens_iter.append(req_stats.first_token_latency)
            req_stats.first_token_ts = engine_core_timestamp
        else:
            self.inter_token_latencies_iter.append(engine_core_timestamp - req_stats.last_token_ts)
        req_stats.last_token_ts = engine_core_timestamp

    def update_from_events(
        self, events: list[EngineCoreEvent], req_stats: RequestStateStats
    ) -> None:
        """Take over the times at which the scheduler queued, scheduled or preempted a request."""
        from vllmx.engine import EngineCoreEventType  # this module is below vllmx.engine

        for event in events:
            if event.type == EngineCoreEventType.QUEUED:
                req_stats.queued_ts = event.timestamp
            elif event.type == EngineCoreEventType.SCHEDULED:
                if req_stats.scheduled_ts == 0.0:  # later ones follow a preemption
                    req_stats.scheduled_ts = event.timestamp
            elif event.type == EngineCoreEventType.PREEMPTED:
                self.num_preempted_reqs += 1

    def update_from_finished_request(
        self,
        finish_reason: FinishReason,
        request_id: str,
        num_prompt_tokens: int,
        max_tokens_param: int | None,
        req_stats: RequestStateStats,
        num_cached_tokens: int = 0,
    ) -> None:
        """Add the summary of a request that ended in this iteration."""
        decode_time = req_stats.last_token_ts - req_stats.first_token_ts
        num_decode_tokens = req_stats.num_generation_tokens - 1  # the first came with the prefill
        self.finished_requests.append(
            FinishedRequestStats(
                finish_reason=finish_reason,
                request_id=request_id,
                e2e_latency=self._time_since(req_stats.arrival_time),
                num_prompt_tokens=num_prompt_tokens,
                num_generation_tokens=req_stats.num_generation_tokens,
                max_tokens_param=max_tokens_param,
                queued_time=req_stats.scheduled_ts - req_stats.queued_ts,
                prefill_time=req_stats.first_token_ts - req_stats.scheduled_ts,
                inference_time=req_stats.last_token_ts - req_stats.scheduled_ts,
                decode_time=decode_time,
                mean_time_per_output_token=(
                    decode_time / num_decode_tokens if num_decode_tokens > 0 else 0
                ),
                is_corrupted=req_stats.is_corrupted,
                num_cached_tokens=num_cached_tokens,
            )
        )
        self.num_corrupted_reqs += req_stats.is_corrupted
