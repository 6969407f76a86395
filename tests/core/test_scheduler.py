# SPDX-License-Identifier: Apache-2.0
import random
from types import SimpleNamespace

import numpy as np
import pytest
from engine_helpers import Loop, make_config, make_request, make_scheduler, run_model, window_spec

from vllmx.core.interface import PauseState
from vllmx.core.kv_cache_manager import KVCacheManager
from vllmx.core.output import LogprobsLists
from vllmx.core.utils import check_sequence_repetition, check_stop, remove_all
from vllmx.engine import EngineCoreEventType, FinishReason
from vllmx.request import Request, RequestStatus
from vllmx.sampling_params import RepetitionDetectionParams, SamplingParams


def scheduled(scheduler_output):
    return scheduler_output.num_scheduled_tokens


def step(scheduler, token=7, **tokens):
    """Schedule and update once; every complete request gets `token` unless it is named."""
    output = scheduler.schedule()
    complete = {
        req_id: list(tokens.get(req_id, [token]))
        for req_id in output.num_scheduled_tokens
        if not scheduler.requests[req_id].is_prefill_chunk
    }
    return output, scheduler.update_from_output(output, run_model(output, complete))


# ---------------------------------------------------------------- budget and chunks


def test_prompts_share_one_budget_and_the_last_is_cut():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=20))
    for name in "abc":
        scheduler.add_request(make_request(name, 8))
    output, _ = step(scheduler)
    assert scheduled(output) == {"a": 8, "b": 8, "c": 4}
    assert output.total_num_scheduled_tokens == 20
    output, outputs = step(scheduler)
    # The running ones go first, then the rest of c.
    assert scheduled(output) == {"a": 1, "b": 1, "c": 4}
    assert [o.request_id for o in outputs[0].outputs] == ["a", "b", "c"]


def test_a_prompt_in_pieces_has_no_output_before_its_last_piece():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=8))
    scheduler.add_request(make_request("a", 20))
    for tokens, has_output in [(8, False), (8, False), (4, True), (1, True)]:
        output, outputs = step(scheduler)
        assert scheduled(output) == {"a": tokens}
        assert bool(outputs[0].outputs) == has_output


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_budget():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=20, enable_chunked_prefill=False))
    for name in "abc":
        scheduler.add_request(make_request(name, 8))
    assert scheduled(step(scheduler)[0]) == {"a": 8, "b": 8}
    assert scheduled(step(scheduler)[0]) == {"a": 1, "b": 1, "c": 8}


def test_long_prefill_threshold_cuts_each_piece():
    scheduler = make_scheduler(
        make_config(max_num_batched_tokens=64, long_prefill_token_threshold=6)
    )
    scheduler.add_request(make_request("a", 14))
    scheduler.add_request(make_request("b", 5))
    assert scheduled(step(scheduler)[0]) == {"a": 6, "b": 5}
    assert scheduled(step(scheduler)[0]) == {"a": 6, "b": 1}
    assert scheduled(step(scheduler)[0]) == {"a": 2, "b": 1}


def test_no_more_than_max_num_seqs_run():
    scheduler = make_scheduler(make_config(max_num_seqs=2))
    for name in "abc":
        scheduler.add_request(make_request(name, max_tokens=1))
    assert scheduler.get_request_counts() == (0, 3)
    output, _ = step(scheduler)
    assert set(scheduled(output)) == {"a", "b"}
    assert scheduler.get_request_counts() == (0, 1)
    output, _ = step(scheduler)
    assert set(scheduled(output)) == {"c"} and output.finished_req_ids == {"a", "b"}


def test_max_num_scheduled_tokens_wins_over_max_num_batched_tokens():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=64, max_num_scheduled_tokens=5))
    scheduler.add_request(make_request("a", 8))
    assert scheduled(step(scheduler)[0]) == {"a": 5}


def test_output_carries_new_requests_once_and_then_only_what_changed():
    scheduler = make_scheduler(make_config(block_size=4))
    scheduler.add_request(make_request("a", 6, max_tokens=9))
    output, _ = step(scheduler)
    (new,) = output.scheduled_new_reqs
    assert (new.req_id, new.num_computed_tokens, len(new.block_ids[0])) == ("a", 0, 2)
    assert new.prefill_token_ids == new.prompt_token_ids
    assert output.scheduled_cached_reqs.num_reqs == 0
    seen = []
    for _ in range(4):
        cached = step(scheduler)[0].scheduled_cached_reqs
        seen.append((cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids))
    assert [s[:2] for s in seen] == [([6], [1]), ([7], [2]), ([8], [3]), ([9], [4])]
    assert [s[2] == [None] for s in seen] == [True, True, False, True]


# ---------------------------------------------------------------- order, priority, preemption


def test_common_prefix_is_counted_for_a_runner_that_reads_it_and_for_no_other(monkeypatch):
    counted = []
    count = KVCacheManager.get_num_common_prefix_blocks

    def counting(self, request_id):
        counted.append(request_id)
        return count(self, request_id)

    monkeypatch.setattr(KVCacheManager, "get_num_common_prefix_blocks", counting)
    shared = [7] * 12
    for settings, expected in (({}, [0]), ({"count_common_prefix": True}, [3])):
        scheduler = make_scheduler(make_config(), **settings)
        for name in "ab":
            scheduler.add_request(make_request(name, [*shared, ord(name)]))
        assert scheduler.schedule().num_common_prefix_blocks == expected
        assert counted == (["a"] if settings else [])


def test_fcfs_preempts_the_last_and_resumes_it_first_as_a_new_request():
    # Six blocks of 4: a and b hold three each at 12 tokens, and then a wants another.
    scheduler = make_scheduler(make_config(num_blocks=7, caching=False))
    scheduler.add_request(make_request("a", 11, max_tokens=4))
    scheduler.add_request(make_request("b", 11, max_tokens=4))
    step(scheduler)
    step(scheduler)
    scheduler.add_request(make_request("c", 4))
    output, outputs = step(scheduler)
    assert scheduled(output) == {"a": 1} and output.preempted_req_ids == {"b"}
    assert scheduler.requests["b"].status == RequestStatus.PREEMPTED
    assert scheduler.get_request_counts() == (1, 2)
    output, outputs = step(scheduler)
    assert output.preempted_req_ids == set()
    assert outputs[0].outputs[0].finish_reason == FinishReason.LENGTH
    output, outputs = step(scheduler)
    # b is resumed first; in the list the new ones come before the resumed.
    other, resumed = output.scheduled_new_reqs
    assert (resumed.req_id, other.req_id) == ("b", "c")
    assert resumed.num_computed_tokens == 0 and len(resumed.prefill_token_ids) == 13
    assert scheduled(output) == {"b": 13, "c": 4}
    types = [event.type for event in outputs[0].outputs[0].events]
    assert types == [EngineCoreEventType.PREEMPTED, EngineCoreEventType.SCHEDULED]


@pytest.mark.parametrize("order", ["012", "021", "102", "120", "201", "210"])
def test_priority_preempts_the_least_urgent_whatever_the_order(order):
    # Three requests of 8 tokens in 6 blocks of 4; each wants a third block, one is free.
    scheduler = make_scheduler(make_config(num_blocks=8, caching=False, policy="priority"))
    for arrival, priority in enumerate(order):
        request = make_request(priority, 8, 8, priority=int(priority), arrival_time=arrival)
        scheduler.add_request(request)
    step(scheduler)
    # Admission was by priority; put the running list into the order of arrival.
    scheduler.running.sort(key=lambda request: request.arrival_time)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == {"2"}
    assert scheduled(output) == {"0": 1, "1": 1}
    assert sum(scheduled(output).values()) == output.total_num_scheduled_tokens
    assert output.scheduled_cached_reqs.num_reqs == 2


def test_priority_victim_scheduled_before_gives_its_budget_back():
    # "idle" comes first in the running list and is scheduled before "urgent" needs its blocks.
    scheduler = make_scheduler(
        make_config(num_blocks=6, caching=False, policy="priority", max_num_batched_tokens=20)
    )
    scheduler.add_request(make_request("idle", 9, 9, priority=1))
    step(scheduler)
    scheduler.add_request(make_request("urgent", 8, 9, priority=0))
    step(scheduler)
    output, _ = step(scheduler)
    assert output.preempted_req_ids == {"idle"}
    assert scheduled(output) == {"urgent": 1}
    assert "idle" not in output.scheduled_cached_reqs.req_ids


def test_priority_victim_without_tokens_in_this_step_does_not_cost_another_its_turn():
    scheduler = make_scheduler(make_config(num_blocks=8, caching=False, policy="priority"))
    for priority in (2, 0, 1):
        scheduler.add_request(
            make_request(str(priority), 8, 8, priority=priority, arrival_time=3 - priority)
        )
    step(scheduler)
    scheduler.running.sort(key=lambda request: -request.priority)
    # "2" stands first and has nothing to compute, as with a step in flight.
    scheduler.requests["2"].num_computed_tokens = scheduler.requests["2"].num_tokens
    output, _ = step(scheduler)
    assert output.preempted_req_ids == {"2"}
    assert scheduled(output) == {"0": 1, "1": 1}


def test_priority_admits_the_most_urgent_first():
    scheduler = make_scheduler(make_config(max_num_seqs=1, policy="priority"))
    for name, priority in [("late", 5), ("urgent", -1), ("mid", 2)]:
        scheduler.add_request(make_request(name, max_tokens=1, priority=priority))
    order = [next(iter(scheduled(step(scheduler)[0]))) for _ in range(3)]
    assert order == ["urgent", "mid", "late"]


def test_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="Unknown scheduling policy: lifo"):
        make_scheduler(make_config(policy="lifo"))


# ---------------------------------------------------------------- admission


def test_full_prompt_must_fit_before_its_first_piece_is_admitted():
    def admitted(reserve):
        scheduler = make_scheduler(
            make_config(
                num_blocks=9,
                max_num_batched_tokens=8,
                caching=False,
                scheduler_reserve_full_isl=reserve,
            )
        )
        scheduler.add_request(make_request("a", 8, 9))
        step(scheduler)
        scheduler.add_request(make_request("b", 32, 9))
        return "b" in scheduled(step(scheduler)[0])

    assert admitted(reserve=False) and not admitted(reserve=True)


def test_watermark_keeps_blocks_free_while_others_run():
    scheduler = make_scheduler(make_config(num_blocks=11, caching=False, watermark=0.5))
    scheduler.add_request(make_request("a", 24, 9))  # alone it may take what it wants
    scheduler.add_request(make_request("b", 4, 9))
    assert set(scheduled(step(scheduler)[0])) == {"a"}


def test_request_that_waits_for_its_grammar_lets_others_pass_and_then_goes_first():
    scheduler = make_scheduler(make_config(max_num_seqs=1))
    scheduler.structured_output_manager = SimpleNamespace(should_advance=lambda request: False)
    constrained = make_request("constrained", max_tokens=1)
    constrained.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    constrained.structured_output_request = SimpleNamespace(grammar=None)
    scheduler.add_request(constrained)
    for name in "ab":
        scheduler.add_request(make_request(name, max_tokens=1))
    assert set(scheduled(step(scheduler)[0])) == {"a"}
    assert scheduler.make_stats().num_skipped_waiting_reqs == 1
    constrained.structured_output_request.grammar = object()
    assert set(scheduled(step(scheduler)[0])) == {"constrained"}


def test_grammar_bitmask_covers_the_constrained_requests_that_sample():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=12))
    calls = []
    scheduler.structured_output_manager = SimpleNamespace(
        grammar_bitmask=lambda requests, req_ids, spec: calls.append(req_ids) or "mask"
    )
    for name, tokens in [("free", 4), ("constrained", 4), ("chunk", 8)]:
        request = make_request(name, tokens)
        if name != "free":
            request.structured_output_request = SimpleNamespace(grammar=object())
        scheduler.add_request(request)
    output = scheduler.schedule()
    grammar = scheduler.get_grammar_bitmask(output)
    assert grammar.structured_output_request_ids == ["constrained"] and calls == [["constrained"]]


# ---------------------------------------------------------------- prefix cache


@pytest.mark.parametrize(
    ("length", "hit"), [(16, 12), (32, 28), (48, 44), (17, 16), (31, 28), (3, 0)]
)
def test_full_hit_leaves_the_last_token_to_compute(length, hit):
    scheduler = make_scheduler(make_config(num_blocks=64))
    prompt = list(range(length))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    step(scheduler)
    scheduler.add_request(make_request("b", prompt, max_tokens=1))
    output, outputs = step(scheduler)
    assert scheduled(output) == {"b": length - hit}
    assert outputs[0].outputs[0].prefill_stats.num_cached_tokens == hit
    assert outputs[0].scheduler_stats.prefix_cache_stats.hits == hit


def test_request_with_prompt_logprobs_does_not_read_the_prefix_cache():
    scheduler = make_scheduler(make_config())
    prompt = list(range(33))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    step(scheduler)
    scheduler.add_request(make_request("b", prompt, max_tokens=1, prompt_logprobs=1))
    assert scheduled(step(scheduler)[0]) == {"b": 33}


def test_hit_is_looked_up_again_when_the_request_gets_its_turn():
    config = make_config(num_blocks=9, max_num_seqs=2)
    loop = Loop(config)
    prefix = list(range(12))
    loop.add(make_request("warm", prefix, max_tokens=1))
    loop.run()
    # "big" takes six of the eight blocks, so "late" has to wait although its prefix is cached.
    loop.add(make_request("big", 21, max_tokens=4))
    loop.step()
    loop.add(make_request("late", [*prefix, 99], max_tokens=6))
    loop.step()
    assert loop.scheduler.get_request_counts() == (1, 1)
    loop.run()  # the checked runner fails if blocks that were evicted are used
    assert loop.tokens["late"] == [3 + p % 97 for p in range(13, 19)]
    assert loop.first["late"].prefill_stats.num_cached_tokens < 12


def test_recompute_after_preemption_counts_as_no_hit():
    config = make_config(num_blocks=12, max_num_seqs=4, max_model_len=64)
    loop = Loop(config)
    for name in "abcd":
        loop.add(make_request(name, 9, max_tokens=20))
    loop.run()
    assert any(event.type == EngineCoreEventType.PREEMPTED for event in _events(loop))
    total = {"hits": 0, "preempted_requests": 0}
    for stats in loop.stats:
        for name in total:
            total[name] += getattr(stats.prefix_cache_stats, name)
    assert total["hits"] == 0 and total["preempted_requests"] > 0
    assert {o.prefill_stats.num_cached_tokens for o in loop.first.values()} == {0}


def _events(loop):
    return [event for output in loop.all_outputs for event in output.events or ()]


def test_cached_token_count_does_not_grow_when_preempted_before_the_first_token():
    scheduler = make_scheduler(make_config(num_blocks=9, max_num_batched_tokens=16))
    scheduler.add_request(make_request("a", 24, max_tokens=2))
    step(scheduler)  # 16 of 24
    scheduler._preempt_request(scheduler.running.pop(), 0.0)
    output, outputs = step(scheduler)
    assert output.scheduled_new_reqs[0].num_computed_tokens == 16  # its own blocks
    assert outputs[0].outputs[0].prefill_stats.num_cached_tokens == 0


def test_reset_needs_preemption_while_requests_run():
    loop = Loop(make_config())
    loop.add(make_request("a", 9, max_tokens=6))
    loop.add(make_request("b", 9, max_tokens=6))
    loop.step()
    loop.step()
    assert loop.scheduler.reset_prefix_cache() is False
    assert loop.scheduler.reset_prefix_cache(reset_running_requests=True) is True
    assert [r.request_id for r in loop.scheduler.waiting] == ["a", "b"]
    output = loop.step()
    assert output.preempted_req_ids == {"a", "b"}
    assert [new.num_computed_tokens for new in output.scheduled_new_reqs] == [0, 0]
    loop.run()
    assert loop.tokens["a"] == loop.tokens["b"] == [3 + p for p in range(9, 15)]


# ---------------------------------------------------------------- requests the cache can't hold


def test_prompt_bigger_than_the_cache_ends_at_once_and_blocks_nobody():
    loop = Loop(make_config(num_blocks=9, max_model_len=128))  # holds 32 tokens
    loop.add(make_request("small", 8, max_tokens=3))
    loop.add(make_request("huge", 60, max_tokens=3))
    loop.add(make_request("after", 8, max_tokens=3))
    loop.run()
    assert loop.finished["huge"].finish_reason == FinishReason.LENGTH
    assert loop.tokens["huge"] == []
    assert len(loop.tokens["small"]) == len(loop.tokens["after"]) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("reserve", [True, False])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_request_that_outgrows_the_cache_ends_with_length_and_the_tokens_it_has(
    policy, reserve, async_scheduling
):
    loop = Loop(
        make_config(
            num_blocks=9,
            max_model_len=128,
            max_num_batched_tokens=8,
            policy=policy,
            scheduler_reserve_full_isl=reserve,
            async_scheduling=async_scheduling,
        )
    )
    loop.add(make_request("grows", 24, max_tokens=90))
    loop.add(make_request("small", 8, max_tokens=3))
    loop.run()
    assert loop.finished["grows"].finish_reason == FinishReason.LENGTH
    # 32 tokens are in the cache and one more was sampled from them.
    assert len(loop.tokens["grows"]) == 9
    assert len(loop.tokens["small"]) == 3


def test_prompt_bigger_than_the_cache_without_reservation_does_not_preempt_itself_forever():
    loop = Loop(
        make_config(num_blocks=9, max_num_batched_tokens=8, scheduler_reserve_full_isl=False)
    )
    loop.add(make_request("huge", 60))
    loop.add(make_request("small", 8))
    loop.run()
    assert loop.finished["huge"].finish_reason == FinishReason.LENGTH
    assert len(loop.tokens["small"]) == 4


# ---------------------------------------------------------------- aborts


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_late_results_of_aborted_requests_are_dropped(async_scheduling):
    rng = random.Random(5)
    loop = Loop(make_config(num_blocks=20, async_scheduling=async_scheduling))
    names = [f"r{i}" for i in range(12)]
    for name in names:
        loop.add(make_request(name, rng.randint(1, 12), max_tokens=8))
    loop.abort("r11")  # before it was ever scheduled
    aborted = {"r11"}
    while loop.scheduler.has_requests() or loop.in_flight:
        victim = rng.choice(names)
        before = len(loop.tokens[victim])

        def between(victim=victim):
            loop.abort(victim, "unknown", victim)
            loop.abort(victim)

        was_alive = victim in loop.scheduler.requests
        loop.step(between)
        if was_alive:
            aborted.add(victim)
            assert len(loop.tokens[victim]) - before <= 1 and victim not in loop.finished
    assert set(loop.finished).isdisjoint(aborted)
    assert len(loop.finished) + len(aborted) == 12
    assert loop.scheduler.kv_cache_manager.usage == 0.0


def test_gauges_go_to_zero_after_all_were_aborted():
    loop = Loop(make_config())
    for i in range(10):
        loop.add(make_request(f"r{i}", 8, max_tokens=50))
    loop.step()
    assert loop.stats[-1].num_running_reqs == 8 and loop.stats[-1].num_waiting_reqs == 2
    loop.abort(*[f"r{i}" for i in range(10)])
    assert loop.scheduler.has_requests()  # so that the engine steps once more
    output = loop.step()
    assert output.total_num_scheduled_tokens == 0 and len(output.finished_req_ids) == 10
    last = loop.stats[-1]
    assert (last.num_running_reqs, last.num_waiting_reqs, last.kv_cache_usage) == (0, 0, 0.0)
    assert not loop.scheduler.has_requests()


def test_finish_requests_names_the_living_and_takes_one_id_or_all():
    scheduler = make_scheduler(make_config(max_num_seqs=2))
    for name in "abcd":
        scheduler.add_request(make_request(name))
    step(scheduler)
    finish = scheduler.finish_requests
    assert finish("a", RequestStatus.FINISHED_STOPPED) == [("a", 0)]
    assert finish("a", RequestStatus.FINISHED_STOPPED) == []
    assert finish(["c", "x", "c"], RequestStatus.FINISHED_ABORTED) == [("c", 0)]
    assert finish(None, RequestStatus.FINISHED_ABORTED) == [("b", 0), ("d", 0)]
    assert scheduler.get_num_unfinished_requests() == 0


def test_id_in_use_is_refused_and_free_again_afterwards():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(make_request("a"))
    with pytest.raises(ValueError, match="'a' is in use"):
        scheduler.add_request(make_request("a"))
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("a"))


# ---------------------------------------------------------------- pause


def test_pause_states():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(make_request("a"))
    step(scheduler)
    scheduler.add_request(make_request("b"))
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert scheduler.get_num_unfinished_requests() == 1
    assert set(scheduled(step(scheduler)[0])) == {"a"}
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.get_num_unfinished_requests() == 0
    assert scheduled(step(scheduler)[0]) == {}
    scheduler.set_pause_state(PauseState.UNPAUSED)
    assert scheduler.pause_state == PauseState.UNPAUSED
    assert set(scheduled(step(scheduler)[0])) == {"a", "b"}


# ---------------------------------------------------------------- outputs


def test_logprobs_go_to_those_who_asked_row_by_row():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(make_request("plain"))
    scheduler.add_request(make_request("asked", logprobs=1, prompt_logprobs=0))
    output = scheduler.schedule()
    result = run_model(output, {"plain": [5], "asked": [6]})
    rows = np.arange(4).reshape(2, 2)
    result.logprobs = LogprobsLists(rows, rows / 10, np.array([1, 2]))
    prompt_rows = LogprobsLists(np.zeros((7, 1)), np.zeros((7, 1)), np.ones(7))
    result.prompt_logprobs_dict = {"asked": prompt_rows}
    result.num_nans_in_logits = {"plain": 3}
    plain, asked = scheduler.update_from_output(output, result)[0].outputs
    assert plain.new_logprobs is None and plain.num_nans_in_logits == 3
    assert asked.new_logprobs.logprob_token_ids.tolist() == [[2, 3]]
    assert asked.new_logprobs.sampled_token_ranks.tolist() == [2]
    assert asked.new_prompt_logprobs_tensors is prompt_rows


def test_each_client_gets_its_own_outputs_and_ended_requests():
    config = make_config()
    scheduler = make_scheduler(config)
    scheduler = type(scheduler)(
        config, scheduler.kv_cache_config, None, 4, include_finished_set=True, log_stats=True
    )
    for client, name in enumerate("ab"):
        request = make_request(name, max_tokens=1)
        request.client_index = client
        scheduler.add_request(request)
    _, outputs = step(scheduler)
    assert [o.request_id for o in outputs[0].outputs] == ["a"]
    assert outputs[1].finished_requests == {"b"}
    assert (outputs[0].scheduler_stats is None) != (outputs[1].scheduler_stats is None)


def test_tokens_after_the_one_that_stops_are_cut():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(make_request("a", max_tokens=9, stop_token_ids=[42]))
    _, outputs = step(scheduler, a=[5, 42, 6])
    output = outputs[0].outputs[0]
    assert output.new_token_ids == [5, 42]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 42)


def test_statistics_are_not_made_when_off():
    scheduler = make_scheduler(make_config(), log_stats=False)
    scheduler.add_request(make_request("a"))
    _, outputs = step(scheduler)
    assert outputs[0].scheduler_stats is None and outputs[0].outputs[0].events is None


# ---------------------------------------------------------------- stop conditions


def stopped(tokens, prompt=2, max_model_len=100, eos=None, **params):
    params = SamplingParams(**{"max_tokens": 50, **params})
    params._eos_token_id = eos
    request = Request("a", list(range(prompt)), params, None)
    request.append_output_token_ids(tokens)
    return check_stop(request, max_model_len), request


@pytest.mark.parametrize(
    ("case", "status", "reason"),
    [
        ({"tokens": [1, 9], "eos": 9}, RequestStatus.FINISHED_STOPPED, None),
        ({"tokens": [1, 9], "eos": 8, "stop_token_ids": [9]}, RequestStatus.FINISHED_STOPPED, 9),
        ({"tokens": [9], "eos": 9, "stop_token_ids": [3]}, RequestStatus.FINISHED_STOPPED, None),
        ({"tokens": [1, 2], "max_tokens": 2}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        ({"tokens": [1, 2], "max_model_len": 4}, RequestStatus.FINISHED_LENGTH_CAPPED, None),
        (
            {"tokens": [9, 9], "eos": 9, "min_tokens": 5, "max_model_len": 4},
            RequestStatus.FINISHED_LENGTH_CAPPED,
            None,
        ),
        (
            {
                "tokens": [1, 2, 1, 2, 1, 2],
                "repetition_detection": RepetitionDetectionParams(4, 1, 3),
            },
            RequestStatus.FINISHED_REPETITION,
            "repetition_detected",
        ),
    ],
)
def test_what_ends_a_request(case, status, reason):
    ended, request = stopped(**case)
    assert ended and request.status == status and request.stop_reason == reason


def test_below_min_tokens_no_token_ends_a_request():
    ended, request = stopped([9, 9], eos=9, stop_token_ids=[9], min_tokens=3)
    assert not ended and request.status == RequestStatus.WAITING
    request.append_output_token_ids(9)
    assert check_stop(request, 100)


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "count", "found"),
    [
        ([1, 1, 1], 1, 1, 3, True),
        ([1, 1], 1, 1, 3, False),
        ([5, 1, 2, 1, 2], 2, 1, 2, True),
        ([1, 2, 1, 3], 2, 1, 2, False),
        ([1, 1, 1, 1], 2, 2, 2, True),
        ([1, 2, 3, 1, 2, 3], 2, 1, 2, False),
        ([1, 1, 1], 0, 0, 3, False),
        ([1, 1, 1], 1, 0, 1, False),
    ],
)
def test_repetition_is_a_tail_of_equal_patterns(tokens, longest, shortest, count, found):
    params = SimpleNamespace(max_pattern_size=longest, min_pattern_size=shortest, min_count=count)
    assert check_sequence_repetition(tokens, params) is found


def test_remove_all():
    assert remove_all([1, 2, 3], set()) == [1, 2, 3]
    assert remove_all([1, 2, 3], {2}) == [1, 3]
    assert remove_all([1, 2, 3], {4}) == [1, 2, 3]
    assert remove_all([1, 2, 3], {1, 3, 5}) == [2]


# ---------------------------------------------------------------- request


def test_status_order_and_reasons():
    order = [status.name for status in RequestStatus]
    assert len(order) == 12 and order[5] == "PREEMPTED"
    assert [RequestStatus.is_finished(status) for status in RequestStatus] == [False] * 6 + [
        True
    ] * 6
    assert str(RequestStatus.get_finished_reason(RequestStatus.FINISHED_IGNORED)) == "length"
    assert RequestStatus.get_finished_reason(RequestStatus.RUNNING) is None


def test_token_views_follow_the_request_and_cannot_be_changed_through():
    request = make_request("a", [1, 2, 3])
    view = request.all_token_ids
    request.append_output_token_ids([4, 5])
    assert view == [1, 2, 3, 4, 5] and view[-1] == 5 and list(request.output_token_ids) == [4, 5]
    assert not hasattr(view, "append") and view.copy() is not view
    with pytest.raises(TypeError):
        view[0] = 9


def test_blocks_are_hashed_as_they_fill():
    request = make_request("a", 6)
    assert len(request.block_hashes) == 1
    request.append_output_token_ids(7)
    assert len(request.block_hashes) == 1
    request.append_output_token_ids(8)
    assert len(request.block_hashes) == 2
    request.append_output_token_ids([1] * 9)
    assert len(request.block_hashes) == 4


def test_request_without_parameters_is_refused():
    with pytest.raises(ValueError, match="sampling_params"):
        Request("a", [1], None, None)


# ---------------------------------------------------------------- windows, async


def test_sliding_window_request_longer_than_the_pool_runs():
    config = make_config(num_blocks=8, max_model_len=128, max_num_batched_tokens=8)
    loop = Loop(config, [window_spec(4, 6)])
    loop.add(make_request("a", 9, max_tokens=60))
    loop.run()
    assert len(loop.tokens["a"]) == 60


def test_async_schedules_ahead_and_does_not_run_past_the_last_token():
    loop = Loop(make_config(async_scheduling=True))
    loop.add(make_request("a", 8, max_tokens=5))
    steps = 0
    while loop.scheduler.has_unfinished_requests() or loop.in_flight:
        output = loop.step()
        steps += bool(output and output.total_num_scheduled_tokens)
    assert len(loop.tokens["a"]) == 5 and steps == 5


def test_async_drops_tokens_of_a_cache_that_was_reset_meanwhile():
    loop = Loop(make_config(async_scheduling=True))
    loop.add(make_request("a", 9, max_tokens=8))
    loop.step()
    loop.step()
    assert loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert loop.scheduler.requests["a"].async_tokens_to_discard == 1
    loop.run()
    assert loop.tokens["a"] == [3 + p for p in range(9, 17)]


def test_async_keeps_events_and_prefill_stats_for_the_first_output_that_is_not_dropped():
    loop = Loop(make_config(async_scheduling=True))
    loop.add(make_request("a", 9, max_tokens=3))
    loop.step()  # its first token is on its way
    loop.scheduler.reset_prefix_cache(reset_running_requests=True)
    loop.run()
    first = loop.first["a"]
    assert first.prefill_stats.num_prompt_tokens == 9 and first.new_token_ids == [12]
    names = [event.type.name for event in first.events]
    assert names == ["QUEUED", "SCHEDULED", "PREEMPTED", "SCHEDULED"]
