# SPDX-License-Identifier: Apache-2.0
"""`use_beam_search` of both routes."""

import pytest
from server.helpers import MODEL, error_of, post

BEAMS = {"model": MODEL, "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1}


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_each_beam_is_a_choice_best_first(engine, url, route: str) -> None:
    chat = route.startswith("chat")
    body = {**BEAMS, "messages": [{"role": "user", "content": "a"}]} if chat else dict(BEAMS)
    body |= {"logprobs": True} if chat else {"prompt": "a"}
    answer = post(url, f"/v1/{route}", body).json()
    first, second = answer["choices"]
    text = first["message"]["content"] if chat else first["text"]
    assert text == "HHH" and (first["index"], second["index"]) == (0, 1)
    assert first["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 6
    # Twice as many candidates as beams, of a request for each beam and step.
    assert {params.logprobs for _, params, _ in engine.seen} == {4}
    assert len(engine.seen) == 1 + 2 + 2


@pytest.mark.parametrize(
    "asked",
    [
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"response_format": {"type": "json_object"}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_beams_over_http_are_held_to_no_grammar_as_upstreams_are_not_and_say_so(url, asked) -> None:
    """Upstream's routes leave the constraint out without a word."""
    response = post(url, "/v1/completions", {**BEAMS, "prompt": "a", **asked})
    error = error_of(response, 400)
    assert error["param"] == "structured_outputs" and "LLM.beam_search" in error["message"]


def test_what_beams_cannot_have_is_refused(url) -> None:
    for wrong, name in (
        ({"stream": True}, "stream"),
        ({"echo": True}, "prompt_logprobs"),
        ({"n": 0}, "n"),
        ({"n": 11}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        response = post(url, "/v1/completions", {**BEAMS, "prompt": "a", **wrong})
        assert error_of(response, 400)["param"] == name


def test_beams_too_many_for_the_engine_are_told_by_the_name_that_was_sent(engine, url) -> None:
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
    ):
        body = {**prompt, "model": MODEL, "use_beam_search": True, "max_tokens": 2}
        error = error_of(post(url, path, {**body, "n": 11}), 400)
        assert error["param"] == "n"
        for words in ("n=11", "the limit is 20 (max_logprobs)", "n=10 at most", "max_logprobs=22"):
            assert words in error["message"], error
        assert "sample logprobs" not in error["message"] and not engine.seen
        assert post(url, path, {**body, "n": 10}).json()["choices"]
        engine.seen.clear()
