# SPDX-License-Identifier: Apache-2.0
import pytest

from vllmx.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, FinishReason
from vllmx.metrics.stats import (
    CachingMetrics,
    IterationStats,
    PrefillStats,
    PrefixCacheStats,
    PromptTokenStats,
    RequestStateStats,
)


def test_hit_rate_covers_the_most_recent_requests():
    metrics = CachingMetrics(max_recent_requests=3)
    assert metrics.empty and metrics.hit_rate == 0.0
    metrics.observe(PrefixCacheStats(requests=2, queries=10, hits=10))
    metrics.observe(PrefixCacheStats())  # pushes nothing out
    metrics.observe(PrefixCacheStats(requests=1, queries=10, hits=0))
    assert metrics.hit_rate == 0.5 and not metrics.empty
    metrics.observe(PrefixCacheStats(requests=2, queries=10, hits=5))
    assert (metrics.aggregated_requests, metrics.hit_rate) == (3, 0.25)
    metrics.observe(PrefixCacheStats(requests=9, queries=4, hits=1))  # larger than the window
    assert (metrics.aggregated_requests, metrics.hit_rate) == (9, 0.25)
    metrics.observe(PrefixCacheStats(reset=True, requests=1, queries=2, hits=1))
    assert (metrics.aggregated_requests, metrics.hit_rate) == (1, 0.5)


def test_lookups_after_a_preemption_are_counted_apart():
    stats = PrefixCacheStats()
    stats.record(num_tokens=10, num_hits=0, preempted=False)
    stats.record(num_tokens=12, num_hits=8, preempted=True)
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 0)
    counted = (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits)
    assert counted == (1, 12, 8)


def test_prompt_tokens_by_source_add_up():
    prefill = PrefillStats()
    prefill.set(num_prompt_tokens=10, num_local_cached_tokens=4, num_external_cached_tokens=1)
    assert (prefill.num_computed_tokens, prefill.num_cached_tokens) == (5, 5)
    stats = PromptTokenStats()
    stats.update_from_output(prefill)
    by_source = [stats.get_by_source(source) for source in PromptTokenStats.ALL_SOURCES]
    assert by_source == [5, 4, 1] and sum(by_source) == stats.total
    with pytest.raises(ValueError, match="Unknown source: disk"):
        stats.get_by_source("disk")


def test_times_of_a_request_from_its_outputs():
    state = RequestStateStats(arrival_time=100.0)
    iteration = IterationStats()
    iteration.iteration_timestamp = 103.0
    kinds = EngineCoreEventType
    events = [
        EngineCoreEvent(kinds.QUEUED, 1.0),
        EngineCoreEvent(kinds.SCHEDULED, 2.0),
        EngineCoreEvent(kinds.PREEMPTED, 2.5),
        EngineCoreEvent(kinds.SCHEDULED, 2.75),
    ]
    prefill = PrefillStats(num_prompt_tokens=7, num_computed_tokens=7)
    first = EngineCoreOutput("a", [5], events=events, prefill_stats=prefill)
    iteration.update_from_output(first, 4.0, True, state)
    for timestamp in (5.0, 7.0):
        iteration.update_from_output(EngineCoreOutput("a", [6]), timestamp, False, state)
    assert iteration.num_generation_tokens == 3 and iteration.num_prompt_tokens == 7
    assert iteration.num_preempted_reqs == 1
    assert iteration.time_to_first_tokens_iter == [3.0]
    assert iteration.inter_token_latencies_iter == [1.0, 2.0]
    iteration.iteration_timestamp = 110.0
    iteration.update_from_finished_request(FinishReason.STOP, "a", 7, 16, state, 2)
    (done,) = iteration.finished_requests
    assert (done.queued_time, done.prefill_time, done.decode_time) == (1.0, 2.0, 3.0)
    assert (done.inference_time, done.mean_time_per_output_token) == (5.0, 1.5)
    assert (done.e2e_latency, done.num_cached_tokens, done.max_tokens_param) == (10.0, 2, 16)
    assert "num_generation_tokens=3" in repr(iteration)


def test_nans_mark_a_request_once():
    state = RequestStateStats()
    iteration = IterationStats()
    output = EngineCoreOutput("a", [5], num_nans_in_logits=2)
    iteration.update_from_output(output, 1.0, True, state)
    iteration.update_from_output(output, 2.0, False, state)
    iteration.update_from_finished_request(FinishReason.STOP, "a", 1, None, state)
    assert iteration.num_corrupted_reqs == 1
    assert iteration.finished_requests[0].is_corrupted
    assert iteration.finished_requests[0].mean_time_per_output_token == 1.0
