# SPDX-License-Identifier: Apache-2.0
from concurrent.futures import Future

import numpy as np
import pytest
from engine_helpers import make_config, make_core, make_request, run_model
from engine_helpers import make_scheduler as make_plain_scheduler

from vllmx.config import SpeculativeConfig
from vllmx.core.output import DraftTokenIds
from vllmx.engine import FinishReason
from vllmx.request import RequestStatus
from vllmx.sampling_params import StructuredOutputsParams


class Digits:
    """A grammar that allows the token ids below 10."""

    def __init__(self):
        self.accepted = []

    def accept_tokens(self, request_id, token_ids):
        self.accepted += token_ids
        return all(token < 10 for token in token_ids)

    def is_terminated(self):
        return False

    def validate_tokens(self, token_ids):
        bad = [i for i, token in enumerate(token_ids) if token >= 10]
        return token_ids[: bad[0]] if bad else token_ids


class Manager:
    """Stands for the structured-output manager; the grammar applies after `reasoning` tokens."""

    def __init__(self, reasoning=0):
        self.reasoning = reasoning
        self.calls = []

    def should_advance(self, request):
        return request.num_output_tokens > self.reasoning

    def trim_reasoning_for_advance(self, request, token_ids):
        return token_ids[max(0, self.reasoning - request.num_output_tokens + len(token_ids)) :]

    def grammar_bitmask(self, requests, req_ids, spec_tokens):
        self.calls.append((req_ids, spec_tokens))
        return np.zeros((len(req_ids), 1), np.int32)


def make_scheduler(manager=None, num_speculative_tokens=None, **settings):
    config = make_config(**settings)
    if num_speculative_tokens is not None:
        config.speculative_config = SpeculativeConfig(num_speculative_tokens, model="ngram")
    scheduler = make_plain_scheduler(config)
    scheduler.structured_output_manager = manager or Manager()
    return scheduler


def constrained(name, grammar=None, **settings):
    request = make_request(
        name,
        max_tokens=10,
        structured_outputs=StructuredOutputsParams(regex="[0-9]+"),
        **settings,
    )
    request.structured_output_request.grammar = grammar
    return request


def step(scheduler, **tokens):
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, run_model(output, tokens))
    return {o.request_id: o for o in outputs[0].outputs}


def test_request_with_a_constraint_waits_for_its_grammar():
    scheduler = make_scheduler()
    compiling = Future()
    request = constrained("a", compiling)
    assert request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.add_request(request)
    assert (len(scheduler.waiting), len(scheduler.skipped_waiting)) == (0, 1)
    assert scheduler.schedule().total_num_scheduled_tokens == 0
    compiling.set_result(Digits())
    assert scheduler.schedule().num_scheduled_tokens == {"a": 8}
    assert make_request("b").structured_output_request is None


@pytest.mark.parametrize("ends", ["a", None])
def test_request_that_is_ended_from_outside_has_no_grammar_compiled(ends):
    scheduler = make_scheduler()
    compiling = Future()
    scheduler.add_request(constrained("a", compiling))
    scheduler.add_request(make_request("free", max_tokens=10))
    scheduler.finish_requests(ends, RequestStatus.FINISHED_ABORTED)
    assert compiling.cancelled() and "a" not in scheduler.requests


def test_request_whose_grammar_is_not_compiled_is_told_why():
    scheduler = make_scheduler()
    compiling = Future()
    compiling.set_exception(ValueError("it has no word"))
    scheduler.add_request(constrained("a", compiling))
    outputs = step(scheduler)
    assert outputs["a"].finish_reason == FinishReason.ERROR
    assert outputs["a"].stop_reason == "The constraint cannot be compiled: it has no word"


def test_grammar_sees_what_was_sampled_and_lets_the_request_go_on():
    scheduler = make_scheduler()
    grammar = Digits()
    scheduler.add_request(constrained("a", grammar))
    scheduler.add_request(make_request("free", max_tokens=10))
    step(scheduler, a=[1], free=[77])
    outputs = step(scheduler, a=[2], free=[78])
    assert grammar.accepted == [1, 2] and not outputs["a"].finished


def test_grammar_that_cannot_advance_ends_its_request_alone_with_an_error(caplog):
    scheduler = make_scheduler()
    scheduler.add_request(constrained("a", Digits()))
    scheduler.add_request(make_request("free", max_tokens=10))
    step(scheduler, a=[1], free=[7])
    outputs = step(scheduler, a=[12], free=[7])
    assert outputs["a"].finish_reason == FinishReason.ERROR
    assert outputs["a"].stop_reason is None, "no fault of the client's"
    assert "Request a ends with an error" in caplog.text
    assert set(scheduler.requests) == {"free"} and len(scheduler.running) == 1
    assert scheduler.schedule().finished_req_ids == {"a"}


def test_tokens_before_the_grammar_begins_are_kept_from_it():
    scheduler = make_scheduler(Manager(reasoning=2))
    grammar = Digits()
    scheduler.add_request(constrained("a", grammar))
    for token in (50, 51, 3):
        step(scheduler, a=[token])
    assert grammar.accepted == [3]


def test_bitmask_is_asked_for_constrained_requests_that_sample_and_only_where_there_are_any():
    manager = Manager()
    scheduler = make_scheduler(manager, max_num_batched_tokens=20)
    scheduler.add_request(make_request("free", 4))
    output = scheduler.schedule()
    assert not output.has_structured_output_requests
    assert scheduler.get_grammar_bitmask(output) is None and not manager.calls
    scheduler.update_from_output(output, run_model(output, {"free": [7]}))
    scheduler.add_request(constrained("a", Digits()))
    scheduler.add_request(constrained("chunk", Digits(), prompt=20))
    output = scheduler.schedule()
    assert scheduler.get_grammar_bitmask(output).structured_output_request_ids == ["a"]
    # It is none of the scheduler's any more once it has ended.
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.get_grammar_bitmask(output) is None


def test_drafts_that_the_grammar_forbids_are_not_scheduled():
    manager = Manager()
    scheduler = make_scheduler(manager, num_speculative_tokens=3)
    scheduler.add_request(constrained("a", Digits()))
    step(scheduler, a=[1])
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[2, 30, 4]]))
    output = scheduler.schedule()
    assert output.scheduled_spec_decode_tokens == {"a": [2]}
    scheduler.get_grammar_bitmask(output)
    assert manager.calls[-1] == (["a"], {"a": [2]})
    scheduler.update_draft_token_ids_in_output(DraftTokenIds(["a"], [[30]]), output)
    assert output.scheduled_spec_decode_tokens == {"a": [-1]}
    assert output.num_invalid_spec_tokens == {"a": 1}


def test_async_step_whose_mask_depends_on_a_token_in_flight_says_so():
    scheduler = make_scheduler(async_scheduling=True)
    scheduler.add_request(constrained("a", Digits()))
    first = scheduler.schedule()
    assert not first.pending_structured_output_tokens
    second = scheduler.schedule()
    assert second.has_structured_output_requests and second.pending_structured_output_tokens


def test_engine_core_samples_such_a_step_after_it_has_taken_in_the_one_before():
    core = make_core(make_config(async_scheduling=True))
    manager = core.scheduler.structured_output_manager = Manager()
    grammar = Digits()
    grammar.accept_tokens = lambda request_id, tokens: grammar.accepted.append(tokens) or True
    core.scheduler.add_request(constrained("a", grammar))
    seen = []
    manager.grammar_bitmask = lambda requests, req_ids, spec: seen.append(len(grammar.accepted))
    core.model_executor.sample_tokens, sample = (
        lambda _: sample(None),
        core.model_executor.sample_tokens,
    )
    while core.scheduler.has_requests() or core.batch_queue:
        core.step_with_batch_queue()
    # The mask of token n is made when the grammar has seen the n tokens before it.
    assert seen == list(range(10))
