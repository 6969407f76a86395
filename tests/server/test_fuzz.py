# SPDX-License-Identifier: Apache-2.0
"""Random bodies: the answer is 200 or an error in OpenAI's shape, and the engine lives on."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server.helpers import error_of, get, post, strict_json

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BASE = {COMPLETIONS: {"prompt": "ab"}, CHAT: {"messages": [{"role": "user", "content": "hi"}]}}
JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-300, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = (
    *("prompt", "messages", "model", "max_tokens", "n", "temperature", "top_p", "top_k", "min_p"),
    *("stop", "stop_token_ids", "logit_bias", "seed", "stream", "stream_options", "suffix"),
    *("tools", "tool_choice", "bad_words", "response_format", "allowed_token_ids", "min_tokens"),
    *("truncate_prompt_tokens", "priority", "chat_template_kwargs", "documents", "user"),
    *("continue_final_message", "vllm_xargs", "cache_salt", "ignore_eos", "request_id"),
)
# The worker of the real engine has no log-probabilities to give.
LOGPROB_FIELDS = ("logprobs", "top_logprobs", "prompt_logprobs", "echo")

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


@FUZZ
@given(path=PATHS, fields=bodies(FIELDS))
def test_no_body_makes_the_engine_fail(letters_url: str, path: str, fields: dict[str, Any]) -> None:
    check(letters_url, path, fields)
