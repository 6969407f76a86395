# SPDX-License-Identifier: Apache-2.0
"""Beam search over a model that is a table of probabilities."""

import asyncio
import itertools
import math
import random

import pytest

from vllmx.entrypoints.beam_search import (
    BeamSearchInstance,
    beam_search,
    get_beam_search_score,
    step_params,
)
from vllmx.exceptions import VLLMValidationError
from vllmx.logprobs import Logprob
from vllmx.outputs import CompletionOutput, RequestOutput
from vllmx.sampling_params import BeamSearchParams

VOCAB, END = 6, 0


class Model:
    """Log-probabilities that depend on the last two tokens."""

    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.table: dict[tuple[int, ...], list[float]] = {}
        self.asked: list[str] = []

    def logprobs(self, tokens: list[int]) -> list[float]:
        key = tuple(tokens[-2:])
        if key not in self.table:
            weights = [self.rng.random() ** 3 for _ in range(VOCAB)]
            self.table[key] = [math.log(w / sum(weights)) for w in weights]
        return self.table[key]

    def result(self, tokens: list[int], count: int) -> RequestOutput:
        found = sorted(enumerate(self.logprobs(tokens)), key=lambda pair: -pair[1])[:count]
        position = {token: Logprob(value) for token, value in found}
        answer = CompletionOutput(0, "", [found[0][0]], None, [position])
        return RequestOutput("r", None, tokens, None, [answer], True)

    async def generate(self, tokens, params, request_id):
        self.asked.append(request_id)
        await asyncio.sleep(0)
        yield self.result(tokens, params.logprobs)


class Words:
    def decode(self, token_ids: list[int]) -> str:
        return " ".join(map(str, token_ids))


def make(max_model_len: int = 100, prompt=(1, 2), **params) -> BeamSearchInstance:
    settings = {"beam_width": 2, "max_tokens": 4, **params}
    return BeamSearchInstance(
        None, list(prompt), BeamSearchParams(**settings), frozenset({END}), max_model_len
    )


def run(model: Model, instance: BeamSearchInstance) -> RequestOutput:
    async def search() -> list[RequestOutput]:
        found = beam_search(instance, "r", Words(), model.generate, "prompt")
        return [output async for output in found]

    (output,) = asyncio.run(search())
    return output


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_as_wide_as_the_space_finds_the_best_of_all(seed, length_penalty) -> None:
    model, steps = Model(seed), 3
    scored = []
    for length in range(1, steps + 1):
        for tail in itertools.product(range(VOCAB), repeat=length):
            ended = tail[-1] == END
            if END in tail[:-1] or not (ended or length == steps):
                continue
            tokens, total = [1, 2], 0.0
            for token in tail:
                total += model.logprobs(tokens)[token]
                tokens.append(token)
            score = get_beam_search_score(tokens, total, END, length_penalty)
            scored.append((score, list(tail[:-1] if ended else tail), total))
    scored.sort(key=lambda one: -one[0])
    width = VOCAB**steps
    output = run(model, make(beam_width=width, max_tokens=steps, length_penalty=length_penalty))
    assert len(output.outputs) == len(scored)
    for got, (_, tail, total) in list(zip(output.outputs, scored, strict=True))[:20]:
        assert got.token_ids == tail
        assert got.cumulative_logprob == pytest.approx(total)
        assert len(got.logprobs) == len(tail)


def test_a_narrow_search_keeps_the_best_prefixes_of_each_length() -> None:
    model = Model(3)
    output = run(model, make(beam_width=2, max_tokens=5, ignore_eos=True))
    beams = [([1, 2], 0.0)]
    for _ in range(5):
        grown = [([*t, i], s + v) for t, s in beams for i, v in enumerate(model.logprobs(t))]
        beams = sorted(grown, key=lambda beam: -beam[1])[:2]
    assert [answer.token_ids for answer in output.outputs] == [tokens[2:] for tokens, _ in beams]
    assert all(answer.finish_reason == "length" for answer in output.outputs)


@pytest.mark.parametrize("include", [False, True])
def test_an_end_token_is_never_text_and_a_token_only_if_asked_for(include: bool) -> None:
    model = Model()
    model.table[1, 2] = [math.log(p) for p in (0.9, 0.05, 0.02, 0.01, 0.01, 0.01)]
    output = run(model, make(max_tokens=1, include_stop_str_in_output=include))
    best, second = output.outputs
    assert (best.finish_reason, best.stop_reason, best.text) == ("stop", END, "")
    assert best.token_ids == [END] * include and len(best.logprobs) == int(include)
    assert (second.finish_reason, second.token_ids, second.text) == ("length", [1], "1")


def test_a_beam_ends_where_the_context_does() -> None:
    output = run(Model(2), make(max_model_len=4, max_tokens=50, ignore_eos=True))
    assert [len(answer.token_ids) for answer in output.outputs] == [2, 2]


def test_every_request_of_a_search_has_an_id_of_its_own() -> None:
    model = Model()
    run(model, make(max_tokens=5, ignore_eos=True))
    assert len(set(model.asked)) == len(model.asked) == 1 + 2 * 4


def test_when_one_beam_fails_the_others_are_given_up() -> None:
    model, closed = Model(), []

    async def generate(tokens, params, request_id):
        if request_id == "r-1-0":
            raise ValueError("no")
        try:
            if request_id == "r-1-1":
                await asyncio.sleep(60)
            yield model.result(tokens, params.logprobs)
        finally:
            closed.append(request_id)

    async def search() -> None:
        async for _ in beam_search(make(ignore_eos=True), "r", Words(), generate):
            pass

    with pytest.raises(ValueError, match="no"):
        asyncio.run(search())
    assert closed == ["r-0-0", "r-1-1"]


def test_a_request_that_brings_no_candidates_ends_its_beam() -> None:
    instance = make()
    empty = CompletionOutput(0, "", [], None, None, finish_reason="abort")
    instance.advance([RequestOutput("r", None, [1], None, [empty], True)])
    assert instance.beams == [] and instance.best() == []


def test_scores_of_any_penalty_are_numbers() -> None:
    tokens = [1] * 1000
    assert get_beam_search_score(tokens, -2.0, END, 1.0) == -0.002
    assert get_beam_search_score([*tokens, END], -2.0, END, 1.0) == -0.002
    assert get_beam_search_score(tokens, -2.0, None, 1e6) == 0.0
    assert get_beam_search_score(tokens, -2.0, None, -1e6) == -math.inf


def advanced(**settings) -> BeamSearchInstance:
    """One beam and four candidates: an end token, and words ever less likely."""
    search = make(ignore_eos=True, **settings.pop("params", {}))
    for name, value in settings.items():
        setattr(search, name, value)
    found = {END: -1.02, 1: -1.0, 2: -1.01, 3: -5.0}
    position = {token: Logprob(value) for token, value in reversed(found.items())}
    answer = CompletionOutput(0, "", [1], None, [position])
    search.advance([RequestOutput("r", None, [1, 2], None, [answer], True)])
    return search


def last_tokens(beams) -> list[int]:
    return [beam.tokens[-1] for beam in beams]


@pytest.mark.parametrize("length_penalty", [5000.0, -5000.0])
def test_where_a_penalty_makes_all_scores_one_the_likelier_beam_is_kept(length_penalty) -> None:
    for online in (False, True):
        search = advanced(params={"length_penalty": length_penalty}, prune_by_logprob=online)
        assert last_tokens(search.beams) == last_tokens(search.best()) == [1, 2]


def test_a_server_keeps_the_likeliest_candidates_and_llm_those_of_the_best_score() -> None:
    """As upstream's online.py and offline.py: an end token that is no end counts as no length."""
    assert last_tokens(advanced(params={"length_penalty": -1.0}).beams) == [END, 1]
    online = advanced(params={"length_penalty": -1.0}, prune_by_logprob=True)
    assert last_tokens(online.beams) == [1, 2]


def test_steps_ask_for_twice_as_many_candidates_as_beams() -> None:
    params = step_params(BeamSearchParams(beam_width=3, max_tokens=9))
    assert (params.logprobs, params.max_tokens, params.temperature) == (6, 1, 0.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"beam_width": 0}, "beam_width must be an integer of at least 1, got 0"),
        ({"beam_width": True}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"beam_width": 2**63}, "beam_width must fit in 64 bits"),
        ({"ignore_eos": "x"}, "ignore_eos must be true or false, got 'x'"),
        ({"temperature": "a"}, "temperature must be a finite number, got 'a'"),
        ({"temperature": 3}, r"temperature must be in \[0, 2\], got 3.0"),
        ({"length_penalty": 10**400}, "length_penalty must be a finite number"),
        ({"length_penalty": math.nan}, "length_penalty must be a finite number, got nan"),
    ],
)
def test_values_out_of_range_are_refused_by_name(params: dict, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message):
        BeamSearchParams(**{"beam_width": 1, "max_tokens": 1, **params})
