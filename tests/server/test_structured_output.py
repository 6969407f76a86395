# SPDX-License-Identifier: Apache-2.0
"""`response_format` and `structured_outputs` over the real engine; its worker says letters."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server.helpers import MODEL, client, error_of, post, strict_json

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
COMPACT = {"structured_outputs": {"disable_any_whitespace": True}}
MESSAGES = [{"role": "user", "content": "hi"}]
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
TAG = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f>"]}


def ask(url: str, path: str, **body: Any) -> Any:
    prompt = {"messages": MESSAGES} if path == CHATS else {"prompt": "ab"}
    return post(url, path, {**prompt, "max_tokens": 60, **body})


def text_of(response: Any) -> str:
    assert response.status_code == 200, response.text
    choice = strict_json(response.text)["choices"][0]
    assert choice["finish_reason"] == "stop"
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_openai_client_gets_answers_in_the_form_that_it_asks_for(letters_url: str) -> None:
    api = client(letters_url)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    asked = {"response_format": form, "max_tokens": 60, "extra_body": COMPACT}
    answer = api.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    assert set(json.loads(answer.choices[0].message.content)) == {"name", "ok"}
    chunks = api.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert set(json.loads(text)) == {"name", "ok"}
    plain = api.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=3, response_format={"type": "text"}
    )
    assert plain.choices[0].message.content.isalpha()
    chosen = api.completions.create(
        model=MODEL,
        prompt="ab",
        n=2,
        extra_body={"structured_outputs": {"choice": ["x1", "y2"]}},
    )
    assert {choice.text for choice in chosen.choices} <= {"x1", "y2"}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_every_constraint_is_taken_by_both_routes(letters_url: str, path: str) -> None:
    for asked, allowed in (
        ({"regex": "[0-9]{3}"}, str.isdigit),
        ({"choice": ["no", "yes"]}, {"no", "yes"}.__contains__),
        ({"grammar": 'root ::= "q" [0-9]'}, lambda text: text[0] == "q" and text[1:].isdigit()),
        (
            {"json": json.dumps(SCHEMA), "disable_any_whitespace": True},
            lambda text: json.loads(text)["ok"] in (True, False) and " " not in text,
        ),
    ):
        assert allowed(text_of(ask(letters_url, path, structured_outputs=asked)))
    tagged = ask(letters_url, path, response_format={"type": "structural_tag", **TAG})
    assert tagged.status_code == 200 and strict_json(tagged.text)["choices"]


UNIQUE = {"type": "array", "uniqueItems": True}
IN_TAGS = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [
            {"begin": "<f>", "content": {"type": "json_schema", "json_schema": UNIQUE}, "end": "."}
        ],
    }
}
IN_STRUCTURES = {**TAG, "structures": [{"begin": "<f>", "schema": UNIQUE, "end": "</f>"}]}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("tag", [IN_TAGS, IN_STRUCTURES], ids=["format", "structures"])
def test_what_a_tag_would_drop_answers_400_with_its_name(
    letters_url: str, path: str, tag: dict[str, Any]
) -> None:
    for asked in (
        {"response_format": {"type": "structural_tag", **tag}},
        {"structured_outputs": {"structural_tag": json.dumps(tag)}},
    ):
        error = error_of(ask(letters_url, path, **asked), 400)
        assert error["param"] == "structured_outputs" and "uniqueItems" in error["message"]


def test_null_in_a_tag_stays(letters_url: str) -> None:
    content = {"type": "json_schema", "json_schema": {"const": None}}
    form = {"type": "structural_tag", "format": content}
    assert text_of(ask(letters_url, COMPLETIONS, response_format=form)) == "null"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("guided_json", "json"),
        ("guided_regex", "regex"),
        ("guided_choice", "choice"),
        ("guided_grammar", "grammar"),
        ("guided_whitespace_pattern", "whitespace_pattern"),
        ("guided_decoding_disable_any_whitespace", "disable_any_whitespace"),
        ("guided_decoding_disable_additional_properties", "disable_additional_properties"),
    ],
)
def test_older_names_are_refused_with_the_new_one(
    letters_url: str, path: str, old: str, new: str
) -> None:
    error = error_of(ask(letters_url, path, **{old: "a"}), 400)
    assert error["param"] == old and f"`structured_outputs` with `{new}`" in error["message"]


@pytest.mark.parametrize("name", ["guided_decoding_disable_fallback", "guided_x"])
def test_no_field_that_begins_like_an_older_name_is_passed_over(
    letters_url: str, name: str
) -> None:
    for path in (COMPLETIONS, CHATS):
        error = error_of(ask(letters_url, path, **{name: False}), 400)
        assert error["param"] == name and "`structured_outputs`" in error["message"]


def test_a_backend_is_no_affair_of_a_request(letters_url: str) -> None:
    error = error_of(ask(letters_url, CHATS, guided_decoding_backend="outlines"), 400)
    assert "--structured-outputs-config" in error["message"]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' field"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format",
            "'schema' of 'json_schema'",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format", "needs a `format`"),
        (
            {"response_format": {"type": "structural_tag", "structures": []}},
            "response_format",
            "need `triggers`",
        ),
        (
            {"response_format": {"type": "structural_tag", **TAG, "structures": [{"begin": "a"}]}},
            "response_format",
            "needs `begin`, `schema` and `end`",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs", "it is not JSON"),
        ({"structured_outputs": {"structural_tag": "[]"}}, "structured_outputs", "JSON object"),
        ({"structured_outputs": {}}, "structured_outputs", "none are specified"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs", "no field 'regexp'"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "structured_outputs",
            "multiple are specified",
        ),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "have one each",
        ),
        (
            {"structured_outputs": {"json": {"uniqueItems": True}}},
            "structured_outputs",
            "uniqueItems",
        ),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs", "must be True"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "cannot be enforced"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs", "strings"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs", "must be a list"),
        ({"structured_outputs": {"json_object": "x"}}, "structured_outputs", "json_object must be"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": ["a"]}},
            "structured_outputs",
            "whitespace_pattern must be text",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": "zz"}},
            "structured_outputs",
            "disable_any_whitespace must be true or false",
        ),
    ],
    ids=str,
)
def test_constraints_that_are_none_answer_400_with_what_is_wrong(
    letters_url: str, body: dict[str, Any], param: str, words: str
) -> None:
    for path in (COMPLETIONS, CHATS):
        error = error_of(ask(letters_url, path, **body), 400)
        assert error["param"] == param and words in error["message"]
    assert text_of(ask(letters_url, COMPLETIONS, structured_outputs={"choice": ["a"]})) == "a"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
@pytest.mark.parametrize("more", [{}, {"n": 2}, {"stream": True}], ids=str)
def test_what_cannot_be_compiled_answers_400_with_the_reason(
    letters_url: str, path: str, more: dict[str, Any]
) -> None:
    """It is found in the engine, when the request is queued."""
    answer = ask(letters_url, path, structured_outputs={"grammar": "root ::= root"}, **more)
    if more == {"stream": True}:
        error = strict_json(answer.text.split("\n")[0].removeprefix("data: "))["error"]
    else:
        error = error_of(answer, 400)
    assert (error["code"], error["param"]) == (400, "structured_outputs")
    assert "no answer can be written" in error["message"]
    assert text_of(ask(letters_url, path, structured_outputs={"choice": ["a"]})) == "a"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_any_schema_is_answered_whatever_it_holds(letters_url: str, path: str) -> None:
    """Numbers of more than 64 bits, and the schema that is no object."""
    for schema in ({"type": "integer", "minimum": 0, "maximum": 2**70}, True, "true"):
        answer = ask(letters_url, path, structured_outputs={"json": schema})
        assert answer.status_code == 200, answer.text
