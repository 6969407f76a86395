# SPDX-License-Identifier: Apache-2.0
import pytest
from engine_helpers import make_config, make_core, make_engine_request, make_scheduler, run_model

from vllmx.core.block_hash import get_request_block_hasher, sha256
from vllmx.engine import FinishReason
from vllmx.request import Request, RequestStatus
from vllmx.sampling_params import SamplingParams

STOP = 2


def piece(tokens, resumable=True, name="s", max_tokens=10, arrival=0.0):
    return Request(
        name,
        list(tokens),
        SamplingParams(max_tokens=max_tokens, stop_token_ids=[STOP]),
        None,
        arrival_time=arrival,
        resumable=resumable,
        block_hasher=get_request_block_hasher(4, sha256),
        hash_block_size=4,
    )


def step(scheduler, **tokens):
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, run_model(output, tokens))
    return output, {o.request_id: o for o in outputs[0].outputs}


def paused(**settings):
    """A session that has answered 7, STOP to the prompt 10..15."""
    scheduler = make_scheduler(make_config(**settings))
    scheduler.add_request(piece(range(10, 16)))
    step(scheduler, s=[7])
    step(scheduler, s=[STOP])
    return scheduler


def test_a_session_that_stops_keeps_its_blocks_and_waits_for_more():
    scheduler = paused()
    session = scheduler.requests["s"]
    assert session.status == RequestStatus.WAITING_FOR_STREAMING_REQ
    assert (scheduler.running, list(scheduler.skipped_waiting)) == ([], [session])
    assert scheduler.num_waiting_for_streaming_input == 1
    # There is nothing to compute, and nothing for the runner to forget.
    assert not scheduler.has_unfinished_requests() and not scheduler.has_finished_requests()
    assert len(scheduler.kv_cache_manager.get_block_ids("s")[0]) == 2
    assert scheduler.schedule().total_num_scheduled_tokens == 0


def test_the_answer_to_a_piece_is_told_as_finished():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(piece(range(10, 16)))
    _, outputs = step(scheduler, s=[STOP])
    assert outputs["s"].finish_reason == FinishReason.STOP and outputs["s"].stop_reason == STOP


def test_the_next_piece_goes_on_from_what_is_computed():
    scheduler = paused()
    scheduler.add_request(piece([20, 21, 22], max_tokens=3, arrival=5.0))
    assert scheduler.num_waiting_for_streaming_input == 0
    output, _ = step(scheduler, s=[8])
    (new,) = output.scheduled_new_reqs
    # The token that ended the answer was never computed, and is not part of the prompt.
    assert new.prompt_token_ids == [*range(10, 16), 7, 20, 21, 22]
    assert new.prefill_token_ids == new.prompt_token_ids
    assert (new.num_computed_tokens, output.num_scheduled_tokens) == (7, {"s": 3})
    session = scheduler.requests["s"]
    assert (session.max_tokens, session.arrival_time) == (3, 5.0)
    assert list(session.output_token_ids) == [8]


def test_block_hashes_follow_what_the_session_becomes():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(piece(range(10, 16)))
    step(scheduler, s=[7])
    # STOP fills the second block; it is dropped, and so is the hash with it.
    step(scheduler, s=[STOP])
    scheduler.add_request(piece([20, 21, 22, 23, 24]))
    session = scheduler.requests["s"]
    fresh = piece([*range(10, 16), 7, 20, 21, 22, 23, 24], resumable=False)
    assert session.block_hashes == fresh.block_hashes and len(fresh.block_hashes) == 3


def test_pieces_that_come_early_wait_for_the_answer_before():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(piece(range(10, 16)))
    step(scheduler, s=[7])
    scheduler.add_request(piece([20]))
    scheduler.add_request(piece([], resumable=False))
    _, outputs = step(scheduler, s=[STOP])
    assert outputs["s"].finished and scheduler.requests["s"].status == RequestStatus.WAITING
    output, _ = step(scheduler, s=[STOP])
    assert output.num_scheduled_tokens == {"s": 1}
    # The last one said that there are no more.
    assert not scheduler.requests and scheduler.finished_req_ids == {"s"}


def test_a_session_is_ended_by_a_piece_that_is_not_resumable_or_by_an_abort():
    for end in ("piece", "abort"):
        scheduler = paused()
        if end == "piece":
            scheduler.add_request(piece([1], resumable=False))
        else:
            scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
        assert scheduler.num_waiting_for_streaming_input == 0
        assert not scheduler.requests and not scheduler.skipped_waiting
        assert scheduler.kv_cache_manager.usage == 0


def test_a_waiting_session_keeps_its_place_in_the_runner():
    scheduler = paused(max_num_seqs=1)
    scheduler.add_request(piece(range(4), resumable=False, name="other"))
    assert not scheduler.schedule().num_scheduled_tokens
    scheduler.add_request(piece([20]))
    output, _ = step(scheduler, s=[STOP])
    assert set(output.num_scheduled_tokens) == {"s"}
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert set(scheduler.schedule().num_scheduled_tokens) == {"other"}


def test_a_request_is_not_given_up_while_a_session_holds_the_blocks():
    scheduler = paused(num_blocks=6)
    # Four of five blocks would do for it; the session has two.
    scheduler.add_request(piece(range(50, 66), resumable=False, name="other"))
    assert not scheduler.schedule().num_scheduled_tokens
    assert scheduler.requests["other"].status == RequestStatus.WAITING
    scheduler.finish_requests("s", RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().num_scheduled_tokens == {"other": 16}


def test_a_piece_takes_its_new_place_by_priority():
    scheduler = paused(policy="priority")
    scheduler.add_request(piece(range(4), resumable=False, name="other", arrival=1.0))
    scheduler.add_request(piece([20], arrival=2.0))
    assert list(scheduler.schedule().num_scheduled_tokens) == ["other", "s"]


def test_the_id_of_a_request_that_is_no_session_stays_in_use():
    scheduler = make_scheduler(make_config())
    scheduler.add_request(piece(range(4), resumable=False))
    with pytest.raises(ValueError, match="Request id 's' is in use"):
        scheduler.add_request(piece([1]))


def test_engine_refuses_sessions_by_name():
    core = make_core(make_config())
    request = make_engine_request("a")
    request.resumable = True
    with pytest.raises(ValueError, match="resumable is not supported"):
        core.preprocess_add_request(request)
