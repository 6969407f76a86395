# SPDX-License-Identifier: Apache-2.0
"""What callers see of the engine's outputs: kinds of output, stops, aborts, n answers, errors."""

import asyncio
import random
import time

import numpy as np
import pytest
from front_helpers import byte_level_tokenizer, make_request, piece_tokenizer, run_processor
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmx.core.output import LogprobsLists
from vllmx.engine import EngineCoreOutput, FinishReason
from vllmx.engine.front import fan_out
from vllmx.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllmx.exceptions import EngineDeadError, EngineGenerateError
from vllmx.metrics.stats import IterationStats, PrefillStats
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import RequestOutputKind

CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
PIECES = piece_tokenizer("a", "b", "c", "d", "\n", "END")
BYTE_LEVEL = byte_level_tokenizer()


def processor(tokenizer=PIECES, **kwargs) -> OutputProcessor:
    return OutputProcessor(tokenizer, **{"log_stats": False, **kwargs})


def joined(outputs: list[RequestOutput], kind: RequestOutputKind, index: int = 0):
    """Text and tokens of one answer, put together as a caller of that kind would."""
    parts = [c for output in outputs for c in output.outputs if c.index == index]
    if kind == DELTA:
        return "".join(c.text for c in parts), [i for c in parts for i in c.token_ids]
    return parts[-1].text, list(parts[-1].token_ids)


def step(*outputs: EngineCoreOutput) -> list[EngineCoreOutput]:
    return list(outputs)


def logprobs_of(*token_ids: int) -> LogprobsLists:
    column = np.array([[i] for i in token_ids], dtype=np.int32)
    return LogprobsLists(column, -column.astype(np.float32), np.ones(len(token_ids), np.int32))


# ------------------------------------------------------------------ kinds of output


@settings(max_examples=100, deadline=None)
@given(
    text=st.text(max_size=20),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=2),
    interval=st.integers(1, 5),
    data=st.data(),
)
def test_every_kind_and_interval_gives_the_same_answer(text, stop, interval, data):
    ids = BYTE_LEVEL.encode(text) or [BYTE_LEVEL.eos_token_id]
    rng = data.draw(st.randoms(use_true_random=False))
    answers = []
    for kind in RequestOutputKind:
        for n in (1, interval):
            front = processor(BYTE_LEVEL, stream_interval=n)
            steps, rest = [], ids
            while rest:
                size = rng.randint(1, 3)
                steps.append(rest[:size])
                rest = rest[size:]
            request = make_request(stop=stop, output_kind=kind)
            outputs, aborted = run_processor(front, request, steps)
            assert outputs[-1].finished
            assert not any(output.finished for output in outputs[:-1])
            assert not front.has_unfinished_requests()
            if kind == FINAL_ONLY:
                assert len(outputs) == 1
            shown, _ = joined(outputs, kind)
            last = outputs[-1].outputs[0]
            answers.append((shown, last.finish_reason, last.stop_reason, bool(aborted)))
    # A stop string may end in the last token, which also ends by length.
    assert len({answer[:3] for answer in answers}) == 1


def test_cumulative_outputs_stay_as_they_were():
    outputs, _ = run_processor(processor(), make_request(), [[0], [1], [2]])
    assert [o.outputs[0].text for o in outputs] == ["a", "ab", "abc"]
    assert [o.outputs[0].token_ids for o in outputs] == [[0], [0, 1], [0, 1, 2]]


def test_delta_outputs_hold_what_is_new():
    outputs, _ = run_processor(processor(), make_request(output_kind=DELTA), [[0], [1, 2], [3]])
    assert [o.outputs[0].text for o in outputs] == ["a", "bc", "d"]
    assert [o.outputs[0].token_ids for o in outputs] == [[0], [1, 2], [3]]


def test_output_carries_what_the_caller_gave():
    front = processor()
    front.add_request(make_request("me", [3, 4]), "the prompt")
    (output,) = front.process_outputs(
        step(EngineCoreOutput("me", [0], prefill_stats=PrefillStats(2, 0, 2)))
    ).request_outputs
    assert (output.request_id, output.prompt, output.prompt_token_ids) == (
        "me",
        "the prompt",
        [3, 4],
    )
    assert output.num_cached_tokens == 2
    assert not output.finished
    assert output.metrics is None


@pytest.mark.parametrize(("kind", "sizes"), [(DELTA, [1, 3, 3, 1]), (CUMULATIVE, [1, 4, 7, 8])])
def test_stream_interval_sends_the_first_token_then_every_third(kind, sizes):
    front = processor(stream_interval=3)
    outputs, _ = run_processor(front, make_request(output_kind=kind), [[i % 4] for i in range(8)])
    assert [len(o.outputs[0].token_ids) for o in outputs] == sizes
    assert joined(outputs, kind) == ("abcdabcd", [0, 1, 2, 3, 0, 1, 2, 3])


def test_detokenize_false_gives_tokens_without_text():
    outputs, _ = run_processor(processor(), make_request(detokenize=False), [[0], [1]])
    assert joined(outputs, CUMULATIVE) == ("", [0, 1])


def test_final_only_makes_nothing_before_the_end():
    front = processor()
    front.add_request(make_request(output_kind=FINAL_ONLY), None)
    for _ in range(5):
        assert front.process_outputs(step(EngineCoreOutput("r", [0]))).request_outputs == []
    detokenizer = front.request_states["r"].detokenizer
    assert detokenizer.output_text == ""


# ------------------------------------------------------------------ ends


def test_stop_string_ends_the_request_and_tells_the_engine():
    for kind in RequestOutputKind:
        front = processor()
        request = make_request(stop=["END"], output_kind=kind)
        outputs, aborted = run_processor(front, request, [[0], [5], [1]], finish_reason=None)
        assert aborted == ["r"]
        completion = outputs[-1].outputs[0]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", "END")
        assert joined(outputs, kind) == ("a", [0, 5])
        assert not front.has_unfinished_requests()
        # What the engine sends before it knows is dropped.
        late = front.process_outputs(step(EngineCoreOutput("r", [1])))
        assert late.request_outputs == late.reqs_to_abort == []


def test_stop_string_in_the_engines_last_token_needs_no_abort():
    request = make_request(stop=["END"])
    outputs, aborted = run_processor(processor(), request, [[0], [5]], FinishReason.LENGTH)
    assert aborted == []
    assert outputs[-1].outputs[0].finish_reason == "stop"


def test_stop_token_is_no_text_and_counts_as_token():
    outputs, _ = run_processor(processor(), make_request(), [[0], [3]], FinishReason.STOP)
    assert joined(outputs, CUMULATIVE) == ("a", [0, 3])
    assert outputs[-1].outputs[0].finish_reason == "stop"
    assert outputs[-1].outputs[0].stop_reason is None


@pytest.mark.parametrize("reason", list(FinishReason))
def test_finish_reasons_are_words(reason):
    outputs, _ = run_processor(processor(), make_request(), [[0]], reason)
    assert outputs[-1].outputs[0].finish_reason == str(reason) == reason.name.lower()


def test_stop_reason_is_shown_only_at_the_end():
    front = processor()
    front.add_request(make_request(), None)
    (output,) = front.process_outputs(
        step(EngineCoreOutput("r", [0], stop_reason=7))
    ).request_outputs
    assert output.outputs[0].stop_reason is None


# ------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stop", [None, ["never there"]])
@pytest.mark.parametrize("interval", [1, 2])
def test_delta_logprobs_are_neither_lost_nor_sent_twice(flat, stop, interval):
    front = processor(stream_interval=interval)
    request = make_request(logprobs=0, flat_logprobs=flat, output_kind=DELTA, stop=stop)
    queue = RequestOutputCollector(DELTA, "r")
    front.add_request(request, None, queue=queue)
    shown, tokens = [], []

    def take():
        if (output := queue.get_nowait()) is not None:
            shown.extend(output.outputs[0].logprobs)
            tokens.extend(output.outputs[0].token_ids)

    for ids in ([0], [1, 2], [3]):
        front.process_outputs(step(EngineCoreOutput("r", ids, new_logprobs=logprobs_of(*ids))))
        take()
    front.abort_requests(["r"], internal=True)  # a last output without tokens
    take()
    assert [list(position) for position in shown] == [[0], [1], [2], [3]]
    assert tokens == [0, 1, 2, 3]


def test_cumulative_logprobs_grow_and_sum_up():
    front = processor()
    front.add_request(make_request(logprobs=0), None)
    outputs = [
        front.process_outputs(
            step(EngineCoreOutput("r", [i], new_logprobs=logprobs_of(i)))
        ).request_outputs[0].outputs[0]
        for i in (1, 2)
    ]  # fmt: skip
    assert [len(o.logprobs) for o in outputs] == [1, 2]
    assert [o.cumulative_logprob for o in outputs] == [-1.0, -3.0]


def test_prompt_logprobs_are_sent_once_in_a_stream_and_always_otherwise():
    for kind, expected in ((DELTA, [2, 0]), (CUMULATIVE, [2, 2])):
        front = processor()
        front.add_request(
            make_request(prompt_token_ids=[0, 1], prompt_logprobs=0, output_kind=kind), None
        )
        first = EngineCoreOutput("r", [2], new_prompt_logprobs_tensors=logprobs_of(1))
        outputs = [
            front.process_outputs(step(output)).request_outputs[0]
            for output in (first, EngineCoreOutput("r", [3]))
        ]
        assert [len(output.prompt_logprobs) for output in outputs] == expected


# ------------------------------------------------------------------ several answers


def add_parent(front, kind, n=3, queue=None, **params):
    request = make_request("r", output_kind=kind, n=n, **params)
    children = list(fan_out(request))
    for child, parent, index in children:
        front.add_request(child, None, parent, index, queue)
    return [child.request_id for child, _, _ in children]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_answers_of_different_lengths_are_kept_apart(kind):
    front = processor()
    ids = add_parent(front, kind, stop=["END"])
    assert front.get_num_unfinished_requests() == 3
    outputs, aborted = [], []
    for batch in (
        [(0, 0, None), (1, 3, None), (2, 5, None)],  # the last one's stop string
        [(0, 1, None), (1, 3, FinishReason.STOP)],
        [(0, 2, FinishReason.LENGTH)],
    ):
        result = front.process_outputs(
            [EngineCoreOutput(ids[i], [token], finish_reason=end) for i, token, end in batch]
        )
        outputs += result.request_outputs
        aborted += result.reqs_to_abort
    assert aborted == [ids[2]]
    assert {output.request_id for output in outputs} == {"r"}
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [joined(outputs, kind, i) for i in range(3)] == [
        ("abc", [0, 1, 2]),
        ("d", [3, 3]),
        ("", [5]),
    ]
    reasons = {c.index: c.finish_reason for o in outputs for c in o.outputs if c.finish_reason}
    assert reasons == {0: "length", 1: "stop", 2: "stop"}
    assert not front.has_unfinished_requests()
    assert not front.parent_requests
    assert not front.external_req_ids
    if kind == FINAL_ONLY:
        assert [c.index for c in outputs[0].outputs] == [0, 1, 2]


def test_children_have_their_own_seeds():
    for n in (2, 4):
        children = list(fan_out(make_request("r", n=n, seed=7)))
        assert [child.sampling_params.seed for child, _, _ in children] == [7, 8, 9, 10][:n]
        assert [child.request_id for child, _, _ in children] == [f"{i}_r" for i in range(n)]
        assert all(child.sampling_params.n == 1 for child, _, _ in children)
    children = [child.sampling_params for child, _, _ in fan_out(make_request("r", n=3))]
    assert all(params is children[0] for params in children)


def test_collector_keeps_answers_apart_when_the_consumer_is_slow():
    for kind in (DELTA, CUMULATIVE):
        front = processor()
        queue = RequestOutputCollector(kind, "r")
        ids = add_parent(front, kind, n=2, queue=queue)
        for number in range(3):
            reason = FinishReason.LENGTH if number == 2 else None
            front.process_outputs(
                [EngineCoreOutput(i, [number + k], finish_reason=reason) for k, i in enumerate(ids)]
            )
        output = queue.get_nowait()
        assert output.finished
        assert {c.index: c.text for c in output.outputs} == {0: "abc", 1: "bcd"}
        assert all(c.finish_reason == "length" for c in output.outputs)
        assert queue.get_nowait() is None


def test_statistics_count_the_parent_once_and_its_longest_answer():
    front = processor(log_stats=True)
    ids = add_parent(front, FINAL_ONLY, n=2)
    stats = IterationStats()
    front.process_outputs(
        [EngineCoreOutput(ids[0], [0, 1, 2], finish_reason=FinishReason.LENGTH)], 1.0, stats
    )
    assert stats.n_params_iter == []
    front.process_outputs(
        [EngineCoreOutput(ids[1], [0], finish_reason=FinishReason.LENGTH)], 2.0, stats
    )
    assert stats.n_params_iter == [2]
    assert stats.max_num_generation_tokens_iter == [3]
    assert [finished.num_generation_tokens for finished in stats.finished_requests] == [3, 1]
    assert stats.num_generation_tokens == 4


# ------------------------------------------------------------------ aborts


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_abort_gives_a_last_output_with_what_there_is(kind):
    front = processor()
    queue = RequestOutputCollector(kind, "r")
    front.add_request(make_request(output_kind=kind, stop=["bEND"]), None, queue=queue)
    front.process_outputs(step(EngineCoreOutput("r", [0, 1])))
    assert front.abort_requests(["r"], internal=False) == ["r"]
    output = queue.get_nowait()
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].text == "ab"  # what was held for the stop string comes out
    # Twice, late, unknown: nothing.
    assert front.abort_requests(["r", "x"], internal=False) == []
    assert front.abort_requests(["r", "x"], internal=True) == []
    assert front.process_outputs(step(EngineCoreOutput("r", [0]))).request_outputs == []


def test_callers_id_aborts_every_request_of_that_id():
    front = processor()
    for internal in ("r-1", "r-2"):
        request = make_request(internal)
        request.external_req_id = "r"
        front.add_request(request, None)
    assert front.abort_requests(["r"], internal=False) == ["r-1", "r-2"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
@pytest.mark.parametrize("internal", [False, True])
def test_abort_of_a_parent_aborts_its_running_children(kind, internal):
    front = processor()
    queue = RequestOutputCollector(kind, "r")
    ids = add_parent(front, kind, queue=queue)
    front.process_outputs(
        [
            EngineCoreOutput(ids[0], [0], finish_reason=FinishReason.LENGTH),
            EngineCoreOutput(ids[1], [1]),
        ]
    )
    assert sorted(front.abort_requests(["r"], internal)) == ids[1:]
    output = queue.get_nowait()
    assert output.finished
    reasons = {c.index: c.finish_reason for c in output.outputs}
    assert reasons == {0: "length", 1: "abort", 2: "abort"}
    assert not front.has_unfinished_requests()
    assert not front.parent_requests
    assert not front.external_req_ids


@pytest.mark.parametrize("kind", [RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA])
def test_cost_of_an_answer_does_not_grow_with_their_number(kind):
    """Time of n answers that end one by one: in proportion to n, not to its square."""

    def seconds(n):
        best = float("inf")
        for _ in range(3):
            front = processor()
            queue = RequestOutputCollector(kind, "r")
            ids = add_parent(front, kind, queue=queue, n=n)
            last = [EngineCoreOutput(i, [0], finish_reason=FinishReason.LENGTH) for i in ids]
            start = time.process_time()
            front.process_outputs(last)
            best = min(best, time.process_time() - start)
            assert len(queue.get_nowait().outputs) == n and not front.external_req_ids
        return best

    # 16 times as many: 256 times as long if every end looked at all the others.
    assert seconds(8192) < 64 * seconds(512)


def test_abort_of_one_child_lets_the_others_end_the_parent():
    front = processor()
    ids = add_parent(front, FINAL_ONLY)
    assert front.abort_requests([ids[1]], internal=True) == [ids[1]]
    result = front.process_outputs(
        [EngineCoreOutput(i, [0], finish_reason=FinishReason.LENGTH) for i in (ids[0], ids[2])]
    )
    (output,) = result.request_outputs
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["length", "abort", "length"]


def test_request_id_that_is_running_is_refused():
    front = processor()
    front.add_request(make_request("r"), None)
    with pytest.raises(ValueError, match="already running"):
        front.add_request(make_request("r"), None)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_of_outputs_and_aborts_leaves_nothing_behind(seed):
    rng = random.Random(seed)
    front = processor()
    running, queues = [], {}
    for number in range(6):
        name = f"r{number}"
        queues[name] = queue = RequestOutputCollector(DELTA, name)
        request = make_request(
            name, output_kind=rng.choice([DELTA, FINAL_ONLY]), n=rng.choice([1, 3])
        )
        for child, parent, index in fan_out(request):
            front.add_request(child, None, parent, index, queue)
            running.append(child.request_id)
    while front.has_unfinished_requests():
        if rng.random() < 0.2:
            names = rng.sample(sorted(queues), 2)
            front.abort_requests(names, internal=False)
            front.abort_requests([rng.choice(running)], internal=True)
        reason = FinishReason.LENGTH
        batch = [
            EngineCoreOutput(i, [0], finish_reason=reason if rng.random() < 0.2 else None)
            for i in rng.sample(running, rng.randint(1, len(running)))
        ]
        front.process_outputs(batch)
    assert not front.parent_requests
    assert not front.external_req_ids
    for queue in queues.values():
        assert queue.get_nowait().finished


# ------------------------------------------------------------------ errors


def test_fault_with_one_request_ends_that_one_alone():
    front = processor()
    queues = {name: RequestOutputCollector(DELTA, name) for name in ("bad", "good")}
    for name, queue in queues.items():
        front.add_request(make_request(name, output_kind=DELTA), None, queue=queue)
    front.request_states["bad"].detokenizer = None
    result = front.process_outputs([EngineCoreOutput(name, [0]) for name in queues])
    assert result.reqs_to_abort == ["bad"]
    with pytest.raises(EngineGenerateError, match="Request bad failed"):
        queues["bad"].get_nowait()
    assert queues["good"].get_nowait().outputs[0].text == "a"
    assert list(front.request_states) == ["good"]


def test_error_reaches_every_waiting_task():
    front = processor()
    queues = [RequestOutputCollector(DELTA, str(i)) for i in range(3)]
    for i, queue in enumerate(queues):
        front.add_request(make_request(str(i)), None, queue=queue)
    front.propagate_error(EngineDeadError())

    async def wait():
        return await asyncio.gather(*(queue.get() for queue in queues), return_exceptions=True)

    assert [type(error) for error in asyncio.run(wait())] == [EngineDeadError] * 3


# ------------------------------------------------------------------ the collector


def output_of(text: str, finished=False, index=0, **kwargs) -> RequestOutput:
    completion = CompletionOutput(
        index,
        text,
        [ord(c) for c in text],
        None,
        None,
        finish_reason="length" if finished else None,
    )
    return RequestOutput("r", None, [1], None, [completion], finished, **kwargs)


def test_collector_waits_merges_and_raises():
    async def run():
        queue = RequestOutputCollector(DELTA, "r")
        waiting = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.put(output_of("a"))
        assert (await waiting).outputs[0].text == "a"
        queue.put(output_of("b"))
        queue.put(output_of("c"))
        queue.put(output_of("d", finished=True))
        output = await queue.get()
        assert output.outputs[0].text == "bcd"
        assert output.outputs[0].token_ids == [98, 99, 100]
        assert output.finished
        queue.put(output_of("e"))
        queue.put(ValueError("boom"))  # an error goes before
        with pytest.raises(ValueError, match="boom"):
            await queue.get()
        assert queue.get_nowait() is None

    asyncio.run(run())


def test_merging_leaves_the_engines_lists_alone():
    front = processor()
    queue = RequestOutputCollector(DELTA, "r")
    front.add_request(make_request(output_kind=DELTA), None, queue=queue)
    outputs = [EngineCoreOutput("r", [i]) for i in range(3)]
    for output in outputs:
        front.process_outputs(step(output))
    assert queue.get_nowait().outputs[0].token_ids == [0, 1, 2]
    assert [output.new_token_ids for output in outputs] == [[0], [1], [2]]


def test_collector_replaces_cumulative_outputs():
    queue = RequestOutputCollector(CUMULATIVE, "r")
    queue.put(output_of("a"))
    queue.put(output_of("ab"))
    queue.put(output_of("x", index=1))
    output = queue.get_nowait()
    assert {c.index: c.text for c in output.outputs} == {0: "ab", 1: "x"}


def test_unknown_arguments_of_a_request_output_are_ignored_with_a_warning(caplog):
    output_of("a", new_in_a_later_release=1)
    assert "new_in_a_later_release" in caplog.text


def test_outputs_have_a_readable_form():
    text = repr(output_of("a", finished=True))
    assert text.startswith("RequestOutput(request_id=r, prompt=None, prompt_token_ids=[1], ")
    assert "CompletionOutput(index=0, text='a', token_ids=[97], " in text
    assert "finish_reason=length, stop_reason=None)" in text
