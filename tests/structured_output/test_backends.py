# SPDX-License-Identifier: Apache-2.0
"""What each library lets through, by its bitmasks, over a small vocabulary."""

import json

import jsonschema
import pytest
from structured_helpers import (
    BACKENDS,
    END,
    VOCAB,
    Kind,
    allowed,
    backend,
    compiled,
    ids,
    matches,
    validate,
)

from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import StructuredOutputsParams
from vllmx.structured_output.schema_features import (
    ENFORCER,
    OUTLINES,
    XGRAMMAR,
    unsupported_feature,
)
from vllmx.structured_output.utils import choice_as_grammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["St. John", "a+b", "x|y", "(p)", 'q"r', "back\\slash", "line\nbreak", "tab\t", "a", "ab"]
CHOICES += ["да", "🔥", "a", "^$", "[x]", "{1}", "#", "&&", "~"]


def choice(name: str, texts: list[str]):
    if name == "xgrammar":
        return compiled(name, Kind.GRAMMAR, choice_as_grammar(texts))
    return compiled(name, Kind.CHOICE, json.dumps(texts, ensure_ascii=False))


@pytest.mark.parametrize("name", BACKENDS)
def test_choices_are_exactly_their_texts(name: str) -> None:
    texts = CHOICES
    if name == "lm-format-enforcer":  # refuses the others
        texts = [text for text in CHOICES if text.isascii()]
    if name == "outlines":  # where a text may end, the library goes on to ends alone
        texts = [text for text in CHOICES if text != "a+b"]
    for text in texts:
        assert matches(choice(name, texts), text), text
    for text in ("Stx John", "aab", "x", "y", "p", "back", "line", "abc", "д", "1"):
        assert not matches(choice(name, texts), text), text


@pytest.mark.parametrize("name", BACKENDS)
def test_json_has_the_shape_that_its_schema_gives(name: str) -> None:
    schema = json.dumps(PERSON)
    assert matches(compiled(name, Kind.JSON, schema), '{"name": "Jo", "age": 3}')
    for text in ('{"name": "Jo"}', '{"name": "toolong", "age": 3}', '{"age": "3"}', "[]", ""):
        assert not matches(compiled(name, Kind.JSON, schema), text), text


@pytest.mark.parametrize("name", ["xgrammar", "guidance", "outlines"])
def test_characters_outside_ascii_stay_as_they_are(name: str) -> None:
    schema = json.dumps({"enum": ["晴天", "雨"]}, ensure_ascii=False)
    assert matches(compiled(name, Kind.JSON, schema), '"晴天"')
    assert not matches(compiled(name, Kind.JSON, schema), '"晴"')
    named = {"type": "object", "properties": {"天气": {"const": "é"}}, "required": ["天气"]}
    grammar = compiled(name, Kind.JSON, json.dumps(named, ensure_ascii=False))
    assert matches(grammar, '{"天气": "é"}')


@pytest.mark.parametrize("name", BACKENDS)
def test_regex_is_matched_as_a_whole_and_then_only_the_end_may_come(name: str) -> None:
    grammar = compiled(name, Kind.REGEX, "[0-9]{2}(a|bb)?")
    assert grammar.accept_tokens("r", ids("12"))
    assert END in allowed(grammar) and not grammar.is_terminated()
    assert grammar.accept_tokens("r", ids("a"))
    assert allowed(grammar) == {END}
    assert not grammar.accept_tokens("r", ids("a"))
    assert grammar.accept_tokens("r", [END]) and grammar.is_terminated()
    grammar.reset()
    assert not grammar.is_terminated() and not matches(grammar, "1")


@pytest.mark.parametrize("name", BACKENDS)
def test_drafts_are_validated_without_a_trace_and_rolled_back(name: str) -> None:
    grammar = backend(name, drafts=4).compile_grammar(Kind.REGEX, "[0-9]{3}")
    before = allowed(grammar)
    draft = [*ids("1"), *ids("2"), *ids("x")]
    assert grammar.validate_tokens(draft) == draft[:2]
    assert grammar.validate_tokens([]) == [] and allowed(grammar) == before
    assert grammar.accept_tokens("r", ids("1"))
    here = allowed(grammar)
    assert grammar.accept_tokens("r", [*ids("2"), *ids("3"), END]) and grammar.is_terminated()
    grammar.rollback(3)
    assert not grammar.is_terminated() and allowed(grammar) == here
    grammar.rollback(0)
    assert matches(grammar, "45")


@pytest.mark.parametrize("name", BACKENDS)
def test_two_requests_of_one_grammar_do_not_share_their_place(name: str) -> None:
    first, second = (compiled(name, Kind.REGEX, "ab") for _ in range(2))
    assert first.accept_tokens("r", ids("a"))
    assert allowed(second) != allowed(first)
    rows = backend(name).allocate_token_bitmask(3)
    assert rows.shape == (3, VOCAB // 32) and (rows == -1).all()
    type(first).fill_bitmasks([first, second], rows, [2, 0])
    assert (rows[1] == -1).all()
    assert {int(t) for t in allowed(first)} != {int(t) for t in allowed(second)}
    single = backend(name).allocate_token_bitmask(2)
    first.fill_bitmask(single, 0)
    second.fill_bitmask(single, 1)
    assert (rows[2] == single[0]).all() and (rows[0] == single[1]).all()


@pytest.mark.parametrize("name", BACKENDS)
def test_special_tokens_stand_for_no_text(name: str) -> None:
    grammar = compiled(name, Kind.JSON, '{"type": "string"}')
    assert grammar.accept_tokens("r", ids('"a'))
    assert END not in allowed(grammar)


def test_xgrammar_bounds_the_whitespace_between_parts() -> None:
    grammar = compiled("xgrammar", Kind.JSON, json.dumps(PERSON))
    assert grammar.accept_tokens("r", ids("{"))
    blanks = 0
    while ids(" ")[0] in allowed(grammar):
        assert grammar.accept_tokens("r", ids(" "))
        blanks += 1
        assert blanks < 100
    assert blanks > 8


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_whitespace_between_parts_may_be_forbidden(name: str) -> None:
    schema = json.dumps(PERSON)
    tight = {"disable_any_whitespace": True}
    assert matches(compiled(name, Kind.JSON, schema, **tight), '{"name":"J o","age":3}')
    assert not matches(compiled(name, Kind.JSON, schema, **tight), '{"name": "Jo","age":3}')
    assert not matches(compiled(name, Kind.JSON, schema, **tight), '{ "name":"Jo","age":3}')


@pytest.mark.parametrize("name", ["xgrammar", "guidance"])
def test_structural_tags_constrain_what_is_between_them(name: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    tag = {"structures": [{"begin": "<f>", "schema": inner, "end": "</f>"}], "triggers": ["<f>"]}
    text = json.dumps(tag)
    assert matches(compiled(name, Kind.STRUCTURAL_TAG, text), 'so <f>{"a": 1}</f> then')
    assert matches(compiled(name, Kind.STRUCTURAL_TAG, text), "nothing at all")
    assert not matches(compiled(name, Kind.STRUCTURAL_TAG, text), 'so <f>{"b": 1}</f>')


@pytest.mark.parametrize("name", ["guidance"])
def test_objects_may_be_closed(name: str) -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    assert matches(compiled(name, Kind.JSON, schema), '{"a": 1, "b": 2}')
    closed = compiled(name, Kind.JSON, schema, disable_additional_properties=True)
    assert not matches(closed, '{"a": 1, "b": 2}')


@pytest.mark.parametrize("name", ["xgrammar", "guidance", "lm-format-enforcer"])
def test_a_json_object_is_no_other_json(name: str) -> None:
    for text, is_object in (('{"a": [1, {"b": null}]}', True), ("[1]", False), ('"a"', False)):
        assert matches(compiled(name, Kind.JSON_OBJECT, ""), text) == is_object


SCHEMAS = [
    *({"type": "object", "required": ["a"]}, {"type": "object", "minProperties": 1}, {}, True),
    *({"type": "array", "minItems": 1}, {"type": "string", "pattern": "^a+$", "maxLength": 3}),
    *({"type": "string", "format": "date", "maxLength": 4}, {"type": "integer", "multipleOf": 3}),
    *({"type": "array", "uniqueItems": True}, {"type": "number", "minimum": 1.5}, {"minimum": 2}),
    *({"type": "object", "propertyNames": {"maxLength": 1}}, {"not": {"type": "integer"}}),
    *({"type": "array", "contains": {"const": 1}}, {"if": {"const": 1}, "then": {"const": 2}}),
    *({"type": "integer", "minimum": -2, "exclusiveMaximum": 12}, {"type": ["string", "null"]}),
    *({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"type": "string", "enum": ["a", 1]}),
    *({"oneOf": [{"type": "integer"}, {"type": "number"}]}, {"$ref": "#/$defs/a", "maximum": 3}),
    *({"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}}, {"const": {"a": [1]}}),
    *({"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, {"type": "null"}),
    {"type": "object", "properties": {"a": {"type": "integer", "multipleOf": 2}}},
]
VALUES = [
    *(None, True, 1, 2, 3, 1.0, 1.25, 1.5, 2.5, 12, -3, -2, "", "a", "aaa", "aaaa", "b", "2020"),
    *("2020-01-01", [], [1], [2], [1, 1], [True], [True, False], [True] * 3, {}, {"a": 1}),
    *({"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"ab": 1}, {"a": [1]}),
]


@pytest.mark.parametrize("name", BACKENDS)
def test_what_a_schema_lets_through_is_valid(name: str) -> None:
    """Each schema is refused, or enforced as a whole: jsonschema is the judge."""
    support = {"xgrammar": XGRAMMAR, "outlines": OUTLINES, "lm-format-enforcer": ENFORCER}.get(name)
    enforced = 0
    for schema in SCHEMAS:
        if support is not None and unsupported_feature(schema, support):
            continue
        try:
            backend(name).compile_grammar(Kind.JSON, json.dumps(schema))
        except Exception:
            continue  # it refuses by itself
        enforced += 1
        validator = jsonschema.Draft202012Validator(schema)
        for value in VALUES:
            if matches(compiled(name, Kind.JSON, json.dumps(schema)), json.dumps(value)):
                assert validator.is_valid(value), (schema, value)
    assert enforced >= {"xgrammar": 10, "guidance": 17}.get(name, 4)


@pytest.mark.parametrize(
    ("schema", "taken", "refused"),
    [
        ({"type": "object", "required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "object", "minProperties": 1}, '{"a": 1}', "{}"),
        ({"type": "array", "minItems": 1}, "[1]", "[]"),
        ({"type": "object"}, '{"a": [1]}', "[]"),
        ({}, '{"a": [null]}', '{"a"}'),
        (True, "[1, {}]", "[1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["auto", "xgrammar", "guidance", "lm-format-enforcer"])
def test_a_shape_that_is_not_described_is_not_empty(name: str, schema, taken, refused) -> None:
    try:
        chosen = validate(StructuredOutputsParams(json=json.dumps(schema)), name)
    except VLLMValidationError:
        assert name != "auto"
        return
    spec = str(chosen.json)
    assert matches(compiled(str(chosen._backend), Kind.JSON, spec), taken)
    assert not matches(compiled(str(chosen._backend), Kind.JSON, spec), refused)
