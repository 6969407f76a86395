# SPDX-License-Identifier: Apache-2.0
"""A schema said in other words allows what it allowed before, and a library knows the words."""

import itertools
import json

import jsonschema
import pytest

from vllmx.exceptions import VLLMValidationError
from vllmx.structured_output.backend_types import JSONOptions, StructuredOutputOptions
from vllmx.structured_output.schema_rewrite import rewrite_schema
from vllmx.structured_output.validation import _choose

SCALARS = [None, True, 0, 3, -4, 2.5, "", "a", "foo", "ab1"]
NAMES = ["a", "b", "foo", "longer"]
VALUES = [
    *SCALARS,
    *([x, *rest] for x in (1, "a", None) for rest in ([], [1], ["a"], [2, 3], [1, 1, True])),
    [],
    {},
    *({name: value} for name in NAMES for value in (1, "x")),
    *({x: 1, y: value} for x, y in itertools.combinations(NAMES, 2) for value in (2, "y", None)),
    {"a": {"a": {"a": 1}}, "b": {"b": {"b": "x"}}},
    dict.fromkeys(NAMES, 1),
]
A, B = {"properties": {"a": {"type": "integer"}}}, {"properties": {"b": True}, "required": ["b"]}
NOTHING_ELSE = {"unevaluatedProperties": False}
SCHEMAS = {
    "unevaluated-alone": {**A, **NOTHING_ELSE},
    "unevaluated-beside-additional": {
        **A,
        "additionalProperties": {"type": "string"},
        **NOTHING_ELSE,
    },
    "unevaluated-beside-all-of": {**A, "allOf": [B, True], **NOTHING_ELSE},
    "unevaluated-beside-a-reference": {**A, "$ref": "#/$defs/b", "$defs": {"b": B}, **NOTHING_ELSE},
    "unevaluated-of-a-schema": {**A, "allOf": [B], "unevaluatedProperties": {"type": "string"}},
    "unevaluated-after-all-are": {"allOf": [{**A, "additionalProperties": True}], **NOTHING_ELSE},
    "unevaluated-and-patterns": {"patternProperties": {"^fo": True}, "allOf": [A], **NOTHING_ELSE},
    "unevaluated-items": {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    "unevaluated-items-beside-all-of": {
        "prefixItems": [True],
        "allOf": [{"prefixItems": [True, {"type": "integer"}]}],
        "unevaluatedItems": False,
    },
    "unevaluated-items-after-items": {"items": {"type": "integer"}, "unevaluatedItems": False},
    "items-as-a-list": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"type": "integer"}, True],
        "additionalItems": {"type": "integer"},
    },
    "nothing-beside-a-reference": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "properties": {"a": {"$ref": "#/definitions/n", "maximum": 1, "minLength": 9}},
        "definitions": {"n": {"type": ["integer", "string"]}},
        "additionalItems": False,
    },
    "additional-items-of-no-list": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": {"type": "integer"},
        "additionalItems": False,
    },
    "required-together": {"dependentRequired": {"a": ["b", "foo"], "b": []}},
    "a-schema-if-there": {"dependentSchemas": {"a": {"required": ["b"], "maxProperties": 2}}},
    "never-there": {"dependentSchemas": {"a": False}},
    "dependencies": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "dependencies": {"a": ["b"], "foo": A, "longer": True},
    },
    "names-by-pattern": {"propertyNames": {"pattern": "^[ab]$"}, "minProperties": 1},
    "names-by-length": {"propertyNames": {"maxLength": 3}, **A},
    "names-by-list": {"propertyNames": {"enum": ["a", "foo"]}},
    "names-by-value": {"propertyNames": {"const": "a"}},
    "no-names": {"propertyNames": False},
    "any-names": {"propertyNames": True, "type": "object"},
    "if-for-nothing": {"if": A, "type": "object"},
    "then-for-nothing": {"then": False, "type": "string"},
    "if-always": {"if": True, "then": {"type": "object"}, "else": {"type": "array"}},
    "if-never": {"if": False, "then": {"type": "object"}, "else": {"type": "array"}},
    "contains-anything": {"contains": True, "minContains": 2, "maxContains": 2, "type": "array"},
    "contains-nothing-needed": {"contains": {"type": "null"}, "minContains": 0, "type": "array"},
    "contains-at-least-one": {"contains": {}, "type": "array"},
    "unique-or-not": {"uniqueItems": False, "type": "array"},
    "unique-alone": {"uniqueItems": True, "maxItems": 1, "type": "array"},
    "not-of-a-type": {"not": {"type": ["object", "number", "null"]}},
    "not-with-a-name": {"not": {"required": ["a"]}},
    "not-not": {"not": {"not": {"type": "string"}}},
    "not-nothing": {"not": False, "type": "string"},
    "counts-as-fractions": {"type": "array", "minItems": 1.0, "maxItems": 2.0},
    "reference-by-name": {
        "$ref": "#whole",
        "$defs": {"w": {"$anchor": "whole", "type": "integer"}},
    },
    "reference-by-address": {
        "$id": "http://example.com/root",
        "properties": {"a": {"$ref": "part"}, "b": {"$ref": "http://example.com/part#/$defs/c"}},
        "$defs": {"p": {"$id": "part", "type": "integer", "$defs": {"c": {"type": "string"}}}},
    },
    "reference-to-the-outside-of-a-part": {
        "$id": "http://example.com/tree",
        "properties": {"a": {"$id": "leaf", "properties": {"a": {"$ref": "tree"}}}},
        "additionalProperties": {"type": "integer"},
    },
    "recursive-reference": {
        "$schema": "https://json-schema.org/draft/2019-09/schema",
        "properties": {"a": {"$recursiveRef": "#"}},
        "additionalProperties": False,
    },
}


def choose(schema):
    spec = json.dumps(schema)
    return _choose("auto", StructuredOutputOptions.JSON, spec, JSONOptions(True, False, None))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_the_other_words_mean_the_same_and_are_known(schema) -> None:
    rewritten = rewrite_schema(schema)
    assert json.dumps(rewritten) != json.dumps(schema)
    before = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    # Libraries go by it: the new words would mean nothing in an older draft.
    assert "$schema" not in rewritten
    after = jsonschema.Draft202012Validator(rewritten)
    verdicts = [(before.is_valid(value), after.is_valid(value)) for value in VALUES]
    assert all(was == now for was, now in verdicts), VALUES[
        [a == b for a, b in verdicts].index(False)
    ]
    choose(schema)


@pytest.mark.parametrize(
    ("schema", "names"),
    [
        ({"not": {"type": "integer"}}, "not"),
        ({"uniqueItems": True}, "uniqueItems"),
        ({"contains": {"const": 1}}, "contains"),
        ({"if": A, "then": B}, "then"),
        ({"anyOf": [A, B], **NOTHING_ELSE}, "unevaluatedProperties"),
        # A condition counts as evaluated what it looks at.
        ({"if": A, **NOTHING_ELSE}, "unevaluatedProperties"),
        ({"not": {"not": A}, **NOTHING_ELSE}, "unevaluatedProperties"),
        (
            {"contains": {"const": 1}, "minContains": 0, "unevaluatedItems": False},
            "unevaluatedItems",
        ),
        ({"$ref": "http://example.com/elsewhere"}, "elsewhere"),
        # A part that is referred to must not be said otherwise.
        ({"$ref": "#/if", "if": {"type": "integer"}}, "if"),
    ],
    ids=str,
)
def test_what_has_no_other_words_is_refused_by_its_name(schema, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        choose(schema)


def test_what_is_known_stays_as_it_is() -> None:
    draft = {"$schema": "https://json-schema.org/draft/2019-09/schema", **A}
    for schema in ({"type": "object", **A}, True, {}, {"enum": [1, {"if": 1}]}, draft):
        assert rewrite_schema(schema) == schema


def test_a_request_gets_the_words_that_are_enforced() -> None:
    """Its own parameters stay as they were: they may be used again."""
    from vllmx.config import StructuredOutputsConfig
    from vllmx.sampling_params import SamplingParams, StructuredOutputsParams
    from vllmx.structured_output.validation import validate_structured_outputs

    asked = StructuredOutputsParams(json={**A, "type": "object", **NOTHING_ELSE})
    params = SamplingParams(structured_outputs=asked)
    validate_structured_outputs(params, None, StructuredOutputsConfig(), object())
    enforced = json.loads(params.structured_outputs.json)
    assert enforced == {**A, "type": "object", "additionalProperties": False}
    assert "unevaluatedProperties" in asked.json


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("{", "not valid|Invalid JSON"),
        ("3", "object or a boolean"),
        ('{"not": ' * 3000 + "true" + "}" * 3000, "too deep"),
        ('{"type": "array", "items": ' * 400 + '{"not": {}}' + "}" * 400, "cannot be enforced"),
    ],
    ids=["cut", "number", "deep", "deep-and-known"],
)
def test_what_is_no_schema_is_refused_as_ever(spec: str, words: str) -> None:
    with pytest.raises(VLLMValidationError, match=words) as refusal:
        _choose("auto", StructuredOutputOptions.JSON, spec, JSONOptions(True, False, None))
    assert refusal.value.parameter == "structured_outputs"
