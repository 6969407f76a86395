# SPDX-License-Identifier: Apache-2.0
"""The scheduler with a KV connector whose answers the test writes."""

import random
from types import SimpleNamespace

import pytest
from engine_helpers import (
    full_spec,
    make_config,
    make_request,
    make_scheduler,
    run_model,
    window_spec,
)

from vllmx.config import KVTransferConfig
from vllmx.core.kv_events import AllBlocksCleared
from vllmx.core.output import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllmx.engine import FinishReason
from vllmx.exceptions import UserError
from vllmx.kv_transfer.base import KVConnectorBase_V1, KVConnectorMetadata
from vllmx.kv_transfer.metrics import KVConnectorStats
from vllmx.request import RequestStatus


class Counts(KVConnectorStats):
    def reset(self):
        self.data.clear()

    def aggregate(self, other):
        self.data.update(other.data)
        return self

    def reduce(self):
        return self.data

    def is_empty(self):
        return not self.data


class ScriptedConnector(KVConnectorBase_V1):
    """`matches`: request id -> (tokens, in the background); `keeps`: requests whose blocks it
    sends after their end."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.matches, self.keeps = {}, set()
        self.allocated, self.added, self.finished = [], [], []
        self.stats, self.events, self.reset_answer = None, [], True
        self.was_shut_down = False

    def on_new_request(self, request):
        self.added.append(request.request_id)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens, in_background = self.matches.get(request.request_id, (0, False))
        if tokens is None:
            return None, False
        return max(tokens - num_computed_tokens, 0), in_background

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        ids = blocks.get_block_ids()[0]
        self.allocated.append((request.request_id, len(ids), num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished(self, request, block_ids):
        self.finished.append((request.request_id, len(block_ids)))
        if request.request_id in self.keeps:
            return True, {"from": request.request_id}
        return False, None

    def get_kv_connector_stats(self):
        return self.stats

    def take_events(self):
        events, self.events = self.events, []
        return events

    def reset_cache(self):
        return self.reset_answer

    def shutdown(self):
        self.was_shut_down = True

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


def scheduler_with(policy="recompute", **config):
    config = make_config(**config)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ScriptedConnector",
        kv_connector_module_path=__name__,
        kv_role="kv_both",
        kv_load_failure_policy=policy,
    )
    return make_scheduler(config)


def complete_requests(scheduler, output):
    """The requests of the step just scheduled that get a token."""
    requests = scheduler.requests
    return [r for r in output.num_scheduled_tokens if not requests[r].is_prefill_chunk]


def take_in(scheduler, output, token=7, complete=None, **report):
    """Give each of `complete` (None: no other step was scheduled meanwhile) a token and report what
    `report` says of transfers."""
    if complete is None:
        complete = complete_requests(scheduler, output)
    result = run_model(output, {req_id: [token] for req_id in complete})
    if report:
        result.kv_connector_output = KVConnectorOutput(**report)
    return scheduler.update_from_output(output, result)


def num_free(scheduler):
    return scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def block_ids(scheduler, request_id):
    return scheduler.kv_cache_manager.get_block_ids(request_id)[0]


# ---------------------------------------------------------------- loads within a step


def test_tokens_that_a_connector_brings_are_not_scheduled():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (8, False)
    scheduler.add_request(make_request("a", 14))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 6}
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8
    assert isinstance(output.kv_connector_metadata, KVConnectorMetadata)
    assert scheduler.connector.added == ["a"]
    assert scheduler.connector.allocated == [("a", 4, 8)]
    outputs = take_in(scheduler, output)[0]
    stats = outputs.scheduler_stats.connector_prefix_cache_stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 14, 8)
    prefill = outputs.outputs[0].prefill_stats
    assert prefill.num_external_cached_tokens == prefill.num_cached_tokens == 8
    # The next report begins anew.
    take_in(scheduler, scheduler.schedule())
    assert scheduler.make_stats().connector_prefix_cache_stats.requests == 0


def test_the_last_token_is_computed_even_if_the_connector_has_it():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (8, False)
    scheduler.add_request(make_request("a", 8))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 1}


def test_local_hits_come_before_what_the_connector_has():
    scheduler = scheduler_with()
    prompt = list(range(100, 120))
    scheduler.add_request(make_request("a", prompt[:9], max_tokens=1))
    take_in(scheduler, scheduler.schedule())
    scheduler.connector.matches["b"] = (16, False)
    scheduler.add_request(make_request("b", prompt))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 4}
    assert scheduler.connector.allocated[-1] == ("b", 5, 8)  # 8 of the 16 were here


def test_prompt_logprobs_are_computed_and_not_loaded():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (8, False)
    scheduler.add_request(make_request("a", 14, prompt_logprobs=1))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 14}


def test_a_request_waits_while_the_connector_does_not_know_and_others_go_on():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (None, False)
    scheduler.add_request(make_request("a", 8))
    scheduler.add_request(make_request("b", 8))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 8}
    take_in(scheduler, output)
    scheduler.connector.matches["a"] = (4, False)
    assert scheduler.schedule().num_scheduled_tokens == {"b": 1, "a": 4}


# ---------------------------------------------------------------- loads in the background


def test_a_load_in_the_background_holds_blocks_that_nobody_can_hit_until_it_ends():
    scheduler = scheduler_with()
    prompt = list(range(100, 110))
    scheduler.connector.matches["a"] = (8, True)
    scheduler.add_request(a := make_request("a", prompt))
    output = scheduler.schedule()
    assert a.status == RequestStatus.WAITING_FOR_REMOTE_KVS and a.num_computed_tokens == 8
    assert not output.num_scheduled_tokens and num_free(scheduler) == 61
    take_in(scheduler, output)

    scheduler.add_request(make_request("b", prompt))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 10}  # no hit
    take_in(scheduler, output, finished_recving={"a"})
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"b": 1, "a": 2}
    assert not scheduler._inflight_prefills
    # Told once what to load, and once that nothing more is.
    assert [call for call in scheduler.connector.allocated if call[0] == "a"] == [
        ("a", 2, 8),
        ("a", 3, 0),
    ]


def test_after_a_load_of_the_whole_prompt_its_last_token_is_computed():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (10, True)
    scheduler.add_request(make_request("a", 10))
    take_in(scheduler, scheduler.schedule(), finished_recving={"a"})
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 9
    assert output.num_scheduled_tokens == {"a": 1}


def test_a_request_without_room_waits_while_a_load_holds_blocks_and_is_given_up_after_it():
    scheduler = scheduler_with(num_blocks=6)  # 5 usable
    scheduler.connector.matches["a"] = (8, True)
    scheduler.add_request(make_request("a", 9, max_tokens=1))
    scheduler.add_request(make_request("big", 24))
    output = scheduler.schedule()
    assert scheduler.get_request_counts() == (0, 2)
    assert not take_in(scheduler, output, finished_recving={"a"})[0].outputs
    outputs = take_in(scheduler, scheduler.schedule())[0].outputs
    assert [output.request_id for output in outputs] == ["a"]
    outputs = take_in(scheduler, scheduler.schedule())[0].outputs
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("big", FinishReason.LENGTH)]
    assert num_free(scheduler) == 5


def test_a_load_starts_only_where_prompts_in_work_will_fit_beside_it():
    scheduler = scheduler_with(num_blocks=11, max_num_batched_tokens=8)  # 10 usable
    scheduler.add_request(make_request("chunked", 24))  # 6 blocks, 2 of them now
    take_in(scheduler, scheduler.schedule())
    scheduler.connector.matches["a"] = (16, True)  # 5 blocks in all
    scheduler.add_request(a := make_request("a", 20))
    take_in(scheduler, scheduler.schedule())
    assert a.status == RequestStatus.WAITING
    scheduler.finish_requests("chunked", RequestStatus.FINISHED_ABORTED)
    scheduler.schedule()
    assert a.status == RequestStatus.WAITING_FOR_REMOTE_KVS


def test_an_aborted_load_keeps_its_blocks_until_it_has_ended():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (8, True)
    scheduler.add_request(make_request("a", 10))
    take_in(scheduler, scheduler.schedule())
    assert scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED) == [("a", 0)]
    assert num_free(scheduler) == 61 and "a" in scheduler.requests
    output = scheduler.schedule()
    assert output.finished_req_ids == {"a"} and scheduler.has_requests()
    assert scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED) == []  # it has ended
    take_in(scheduler, output, finished_recving={"a"})
    assert num_free(scheduler) == 63 and not scheduler.requests and not scheduler.has_requests()


def test_a_request_whose_load_has_just_ended_is_freed_at_once_by_an_abort():
    scheduler = scheduler_with()
    scheduler.connector.matches["a"] = (8, True)
    scheduler.add_request(make_request("a", 10))
    take_in(scheduler, scheduler.schedule(), finished_recving={"a"})
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert num_free(scheduler) == 63 and not scheduler.finished_recving_kv_req_ids


# ---------------------------------------------------------------- sends after the end


def test_a_connector_keeps_blocks_until_they_are_sent_and_the_caller_gets_its_parameters():
    scheduler = scheduler_with()
    scheduler.connector.keeps = {"a"}
    scheduler.add_request(make_request("a", 10, max_tokens=1))
    (output,) = take_in(scheduler, scheduler.schedule())[0].outputs
    assert output.finished and output.kv_transfer_params == {"from": "a"}
    assert scheduler.connector.finished == [("a", 3)]
    assert num_free(scheduler) == 60 and scheduler.get_num_unfinished_requests() == 0
    scheduler.add_request(make_request("b", 4, max_tokens=2))
    take_in(scheduler, scheduler.schedule())
    (output,) = take_in(scheduler, scheduler.schedule(), finished_sending={"a"})[0].outputs
    assert output.kv_transfer_params is None
    assert num_free(scheduler) == 63 and not scheduler.requests


def test_a_connector_with_something_to_push_keeps_the_engine_stepping():
    scheduler = scheduler_with()
    assert not scheduler.has_requests()
    scheduler.connector.has_pending_push_work = lambda: True
    assert scheduler.has_requests()


# ---------------------------------------------------------------- loads that fail


def test_a_failed_load_within_a_step_is_computed_again_and_sent_as_a_new_request():
    scheduler = scheduler_with("recompute")
    scheduler.connector.matches["a"] = (12, False)
    prompt = list(range(100, 114))
    scheduler.add_request(a := make_request("a", prompt))
    output = scheduler.schedule()
    bad = block_ids(scheduler, "a")[1]
    outputs = take_in(scheduler, output, invalid_block_ids={bad})
    assert not outputs[0].outputs and a.num_output_tokens == 0
    assert a.status == RequestStatus.RUNNING and a.num_computed_tokens == 4
    # Nobody must hit the blocks from there on before they are computed.
    scheduler.add_request(make_request("b", prompt))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 10, "b": 10}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["b", "a"]
    assert output.scheduled_new_reqs[1].num_computed_tokens == 4
    assert output.scheduled_new_reqs[1].block_ids == (block_ids(scheduler, "a"),)
    assert output.preempted_req_ids == {"a"} and output.scheduled_cached_reqs.num_reqs == 0
    (first, _) = take_in(scheduler, output)[0].outputs
    assert (first.request_id, first.new_token_ids) == ("a", [7])
    assert scheduler.schedule().scheduled_cached_reqs.req_ids == ["a", "b"]


def test_a_block_that_several_share_is_computed_by_the_first_of_them():
    scheduler = scheduler_with("recompute")
    scheduler.connector.matches["a"] = (12, False)
    prompt = list(range(100, 114))
    scheduler.add_request(a := make_request("a", prompt))
    scheduler.add_request(b := make_request("b", [*prompt[:12], 5, 6]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 2, "b": 2}
    bad = block_ids(scheduler, "a")[2]
    assert bad in block_ids(scheduler, "b")
    assert not take_in(scheduler, output, invalid_block_ids={bad})[0].outputs
    assert (a.num_computed_tokens, b.num_computed_tokens) == (8, 12)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 6, "b": 2}
    assert {new.req_id for new in output.scheduled_new_reqs} == {"a", "b"}


def test_a_failed_load_ends_the_request_with_an_error_if_the_policy_says_so():
    scheduler = scheduler_with("fail")
    scheduler.connector.matches["a"] = (12, False)
    scheduler.add_request(make_request("a", 14))
    scheduler.add_request(make_request("b", 14))
    output = scheduler.schedule()
    bad = scheduler.kv_cache_manager.block_pool.blocks[block_ids(scheduler, "a")[1]]
    assert bad.block_hash is not None
    outputs = take_in(scheduler, output, invalid_block_ids={bad.block_id})[0].outputs
    assert [(o.request_id, o.finish_reason, o.new_token_ids) for o in outputs] == [
        ("b", None, [7]),
        ("a", FinishReason.ERROR, []),
    ]
    assert bad.block_hash is None and bad.ref_cnt == 0
    assert scheduler.schedule().finished_req_ids == {"a"}


@pytest.mark.parametrize(("bad", "kept"), [(1, 4), (0, 0)])
def test_what_a_failed_load_in_the_background_did_bring_is_kept(bad, kept):
    scheduler = scheduler_with("recompute")
    scheduler.connector.matches["a"] = (12, True)
    scheduler.add_request(a := make_request("a", 14))
    output = scheduler.schedule()
    bad_block = block_ids(scheduler, "a")[bad]
    take_in(scheduler, output, invalid_block_ids={bad_block})
    assert a.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    take_in(scheduler, scheduler.schedule(), finished_recving={"a"})
    scheduler.connector.matches.clear()
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 14 - kept}
    assert not scheduler.failed_recving_kv_req_ids and not scheduler._inflight_prefills
    take_in(scheduler, output)
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert num_free(scheduler) == 63


def test_tokens_of_steps_in_flight_are_dropped_after_a_failed_load():
    scheduler = scheduler_with("recompute", async_scheduling=True)
    scheduler.connector.matches["a"] = (8, False)
    scheduler.add_request(a := make_request("a", 10, max_tokens=3))
    first, second = scheduler.schedule(), scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 1}
    bad = block_ids(scheduler, "a")[0]
    take_in(scheduler, first, token=1, invalid_block_ids={bad})
    third = scheduler.schedule()
    assert third.num_scheduled_tokens == {"a": 10}
    take_in(scheduler, second, token=2)
    assert a.num_output_tokens == 0
    fourth = scheduler.schedule()
    take_in(scheduler, third, token=3)
    fifth = scheduler.schedule()
    take_in(scheduler, fourth, token=4)
    take_in(scheduler, fifth, token=5)
    assert list(a.output_token_ids) == [3, 4, 5] and a.is_finished()


# ---------------------------------------------------------------- frees that wait


def test_blocks_of_an_aborted_request_are_not_loaded_into_while_a_step_writes_to_them():
    scheduler = scheduler_with(num_blocks=6, async_scheduling=True, caching=False)
    assert scheduler.defer_block_free
    scheduler.add_request(make_request("a", 14))
    first = scheduler.schedule()
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    scheduler.connector.matches["b"] = (8, True)
    scheduler.add_request(b := make_request("b", 10))
    second = scheduler.schedule()  # 1 block is free, and 4 will be: it waits
    assert b.status == RequestStatus.WAITING and scheduler.get_request_counts() == (0, 1)
    take_in(scheduler, first, complete=["a"])
    assert num_free(scheduler) == 5
    scheduler.schedule()
    assert b.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    take_in(scheduler, second)


@pytest.mark.parametrize(("role", "asynchronous"), [("kv_producer", True), ("kv_both", False)])
def test_frees_do_not_wait_where_no_load_can_come_between(role, asynchronous):
    config = make_config(async_scheduling=asynchronous)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ScriptedConnector", kv_connector_module_path=__name__, kv_role=role
    )
    assert not make_scheduler(config).defer_block_free


# ---------------------------------------------------------------- the rest


def test_statistics_of_workers_and_scheduler_become_one():
    scheduler = scheduler_with()
    for own, workers, whole in [
        (None, None, None),
        ({"a": 1}, None, {"a": 1}),
        (None, {"b": 2}, {"b": 2}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
    ]:
        scheduler.connector.stats = Counts(own) if own else None
        report = KVConnectorOutput(kv_connector_stats=Counts(workers) if workers else None)
        result = ModelRunnerOutput([], {}, kv_connector_output=report)
        outputs = scheduler.update_from_output(scheduler.schedule(), result)
        assert outputs[0].scheduler_stats.kv_connector_stats == whole


def test_events_of_the_connector_are_published():
    scheduler = scheduler_with()
    published = []
    scheduler.kv_event_publisher = SimpleNamespace(publish=published.append)
    scheduler.connector.events = [AllBlocksCleared()]
    for _ in range(2):
        scheduler.update_from_output(scheduler.schedule(), EMPTY_MODEL_RUNNER_OUTPUT)
    assert [batch.events for batch in published] == [[AllBlocksCleared()]]


def test_the_connectors_cache_is_reset_with_the_prefix_cache_if_asked():
    scheduler = scheduler_with()
    assert scheduler.reset_prefix_cache(reset_connector=True)
    assert scheduler.make_stats().connector_prefix_cache_stats.reset
    scheduler.connector.reset_answer = False
    assert not scheduler.reset_prefix_cache(reset_connector=True)
    assert scheduler.reset_prefix_cache()
    # A load that is under way holds blocks.
    scheduler.connector.matches["a"] = (8, True)
    scheduler.add_request(make_request("a", 10))
    scheduler.schedule()
    assert not scheduler.reset_prefix_cache(reset_running_requests=True)


def test_shutdown_reaches_the_connector():
    scheduler = scheduler_with()
    scheduler.shutdown()
    assert scheduler.connector.was_shut_down


def test_several_groups_need_a_connector_for_them():
    config = make_config()
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="ScriptedConnector", kv_connector_module_path=__name__, kv_role="kv_both"
    )
    with pytest.raises(UserError, match="does not support HMA"):
        make_scheduler(config, [full_spec(4), window_spec(4, 8)])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_happens_all_blocks_come_back(seed, asynchronous):
    rng = random.Random(seed)
    scheduler = scheduler_with(
        rng.choice(["fail", "recompute"]),
        num_blocks=24,
        max_num_batched_tokens=16,
        async_scheduling=asynchronous,
    )
    connector = scheduler.connector
    in_flight, started, sending, number = [], set(), set(), 0
    for step in range(400):
        if step < 300 and rng.random() < 0.4:
            name, number = f"r{number}", number + 1
            prompt = [rng.choice((1, 2))] * 12 + [number] * rng.randrange(1, 30)
            connector.matches[name] = (4 * rng.randrange(len(prompt) // 4 + 1), rng.random() < 0.5)
            if rng.random() < 0.3:
                connector.keeps.add(name)
            scheduler.add_request(make_request(name, prompt, max_tokens=rng.randrange(1, 9)))
        if scheduler.requests and (rng.random() < 0.05 or step > 390):
            # None waits for ever: all that is left is ended.
            names = list(scheduler.requests) if step > 390 else [rng.choice([*scheduler.requests])]
            scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        in_flight.append((output, complete_requests(scheduler, output)))
        if len(in_flight) <= asynchronous:
            continue
        loading = {
            req_id
            for req_id, (num_tokens, in_background) in connector.matches.items()
            if in_background
            and (request := scheduler.requests.get(req_id)) is not None
            and (request.status == RequestStatus.WAITING_FOR_REMOTE_KVS or req_id in started)
        } - scheduler.finished_recving_kv_req_ids
        started |= loading
        received = {r for r in loading if rng.random() < 0.4}
        started -= received
        sending = {
            r
            for r in connector.keeps
            if (request := scheduler.requests.get(r)) is not None
            and request.is_finished()
            and r not in loading
        }
        bad = set()
        if rng.random() < 0.1 and scheduler.requests:
            bad = set(block_ids(scheduler, rng.choice([*scheduler.requests]))[:1])
        output, complete = in_flight.pop(0)
        take_in(
            scheduler,
            output,
            complete=complete,
            finished_recving=received,
            finished_sending={r for r in sending if rng.random() < 0.5},
            invalid_block_ids=bad,
        )
    assert number > 50 and not scheduler.running
    for _ in range(40):
        output, _ = in_flight.pop(0) if in_flight else (scheduler.schedule(), [])
        left = [r for r, request in scheduler.requests.items() if request.is_finished()]
        ended = {r for r in left if r in started or r in connector.keeps}
        take_in(
            scheduler,
            output,
            complete=[],
            finished_recving={r for r in ended if r in started},
            finished_sending={r for r in ended if r not in started},
        )
        started -= ended
    assert not scheduler.requests and num_free(scheduler) == 23
    assert not scheduler.deferred_frees and not scheduler._inflight_prefills
