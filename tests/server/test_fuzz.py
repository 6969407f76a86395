# SPDX-License-Identifier: Apache-2.0
"""Random bodies: the answer is 200 or an error in OpenAI's shape, and the engine lives on."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.helpers import error_of, get, post, strict_json

from vllmx.entrypoints.openai.protocol_chat import ChatCompletionRequest
from vllmx.entrypoints.openai.protocol_completion import CompletionRequest
from vllmx.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
EXTREME = [2**63, 2**64, 2**70, -(2**70), 10**400, "\ud800"]
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from(EXTREME)
    | st.integers(-300, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
# The worker of the real engine has no log-probabilities to give.
LOGPROB_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs", "echo", "use_beam_search")
ALL_FIELDS = {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}
FIELDS = tuple(sorted(ALL_FIELDS.difference(LOGPROB_FIELDS)))

CONSTRAINTS = [field.name for field in fields_of(StructuredOutputsParams) if field.init]
DETECTION = [field.name for field in fields_of(RepetitionDetectionParams)]
TOKENS = st.lists(st.integers(-5, 300), max_size=4)
TEXTS = st.lists(st.text(max_size=4), max_size=3)
LIKELY = {
    "prompt": st.text(max_size=9) | TOKENS | st.lists(TOKENS, max_size=3) | TEXTS,
    "stop": st.text(max_size=2) | TEXTS,
    "stop_token_ids": TOKENS,
    "allowed_token_ids": TOKENS,
    "bad_words": TEXTS,
    "logit_bias": st.dictionaries(st.integers(-5, 300).map(str), st.floats(-200, 200), max_size=3),
    "max_tokens": st.integers(-2, 140),
    "n": st.integers(-1, 4),
    "temperature": st.floats(-0.5, 3),
    "stream": st.booleans(),
    "structured_outputs": st.dictionaries(st.sampled_from(CONSTRAINTS), JSON_VALUES, max_size=3),
    "repetition_detection": st.dictionaries(st.sampled_from(DETECTION), JSON_VALUES, max_size=3),
    "vllm_xargs": st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3),
}


def bodies(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies with up to four of `names`, some of the right type."""
    pair = st.sampled_from(names).flatmap(
        lambda name: st.tuples(st.just(name), LIKELY.get(name, JSON_VALUES) | JSON_VALUES)
    )
    return st.lists(pair, max_size=4).map(dict)


def check(url: str, path: str, fields: dict[str, Any]) -> None:
    """Post the body and look at the answer."""
    n = fields.get("n")
    if isinstance(n, int) and n > 50:
        fields["n"] = 50
    response = post(url, path, {**BASE[path], "max_tokens": 2, **fields})
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        error_of(response, response.status_code)
    elif not response.headers["content-type"].startswith("text/event-stream"):
        strict_json(response.text)
    assert get(url + "/health").status_code == 200


FUZZ = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
PATHS = st.sampled_from([COMPLETIONS, CHAT])


@FUZZ
@given(path=PATHS, fields=bodies(FIELDS + LOGPROB_FIELDS))
def test_no_body_makes_the_server_fail(url: str, path: str, fields: dict[str, Any]) -> None:
    check(url, path, fields)


ODD: list[Any] = [None, True, False, 0, 1, -1, 2.5, *EXTREME, -1e300, "", "x", "no", [], {}]
ODD += [[1], [2**70], ["\ud800"], [[None]], {"a": 2**70}, {"a": "\ud800"}, {"1": 10**400}]
ODD += [{"type": "json_object"}, {"type": "integer", "maximum": 2**70}]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_every_field_takes_or_refuses_every_kind_of_value(
    letters_url: str, path: str, value: Any
) -> None:
    """Inner fields of structured outputs and of repetition detection among them: all that the
    engine is sent."""
    for name in FIELDS:
        check(letters_url, path, {name: value})
    for name in CONSTRAINTS:
        given = {"json": {"type": "object"}} if "_" in name and name[0] in "dw" else {}
        check(letters_url, path, {"structured_outputs": {**given, name: value}})
    schema = {"name": "x", "schema": value}
    check(letters_url, path, {"response_format": {"type": "json_schema", "json_schema": schema}})
    for name in DETECTION:
        sane = {"max_pattern_size": 2, "min_count": 2}
        check(letters_url, path, {"repetition_detection": {**sane, name: value}})
    for name in ("vllm_xargs", "chat_template_kwargs"):
        check(letters_url, path, {name: {"a": value}})


@pytest.mark.parametrize("value", ODD, ids=lambda value: type(value).__name__)
def test_every_field_of_a_beam_search_does(url: str, value: Any) -> None:
    for path in (COMPLETIONS, CHAT):
        for name in sorted(ALL_FIELDS):
            check(url, path, {"use_beam_search": True, name: value})


@FUZZ
@given(path=PATHS, fields=bodies(FIELDS))
def test_no_body_makes_the_engine_fail(letters_url: str, path: str, fields: dict[str, Any]) -> None:
    check(letters_url, path, fields)
