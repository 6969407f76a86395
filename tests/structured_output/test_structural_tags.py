# SPDX-License-Identifier: Apache-2.0
"""What stands in a structural tag is held to the rules of what stands alone, at every place."""

import json
from typing import Any, get_args

import pytest
import xgrammar
from structured_helpers import Kind, allowed, compiled, ids, matches, refusal, validate
from xgrammar.structural_tag import Format

from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import StructuredOutputsParams
from vllmx.structured_output.schema_features import XGRAMMAR
from vllmx.structured_output.structural_tags import parts_of

Tag = dict[str, Any]


def tag_of(content: Tag) -> Tag:
    return {"type": "tag", "begin": "<f>", "content": content, "end": "</f>"}


def of_token(content: Tag) -> Tag:
    return {**tag_of(content), "begin": {"type": "token", "token": 7}}


TEXT = {"type": "const_string", "value": "x"}
PLACES = {
    "alone": lambda inner: inner,
    "sequence": lambda inner: {"type": "sequence", "elements": [TEXT, inner]},
    "or": lambda inner: {"type": "or", "elements": [TEXT, inner]},
    "tag": tag_of,
    "tag without a type": lambda inner: {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [{"begin": "<f>", "content": inner, "end": "</f>"}],
    },
    "triggered_tags": lambda inner: {
        "type": "triggered_tags",
        "triggers": ["<f"],
        "tags": [tag_of(inner)],
    },
    "token_triggered_tags": lambda inner: {
        "type": "token_triggered_tags",
        "trigger_tokens": [7],
        "tags": [of_token(inner)],
    },
    "tags_with_separator": lambda inner: {
        "type": "tags_with_separator",
        "separator": ",",
        "tags": [{**tag_of(TEXT), "begin": "<g>"}, tag_of(inner)],
    },
    "optional": lambda inner: {"type": "optional", "content": inner},
    "plus": lambda inner: {"type": "plus", "content": tag_of(inner)},
    "star": lambda inner: {"type": "star", "content": tag_of(inner)},
    "repeat": lambda inner: {"type": "repeat", "min": 1, "max": 2, "content": tag_of(inner)},
    "dispatch": lambda inner: {"type": "dispatch", "rules": [["<f>", inner]]},
    "token_dispatch": lambda inner: {"type": "token_dispatch", "rules": [[7, inner]]},
    "tags within tags": lambda inner: tag_of(
        {"type": "sequence", "elements": [{"type": "or", "elements": [TEXT, tag_of(inner)]}]}
    ),
}
LEAVES = {"const_string", "any_text", "token", "exclude_token", "any_tokens"}
HOLDERS = {"json_schema", "qwen_xml_parameter", "regex", "grammar"}


def json_format(schema: Any, **settings: Any) -> Tag:
    return {"type": "json_schema", "json_schema": schema, **settings}


def asked(content: Tag, **settings: Any) -> StructuredOutputsParams:
    text = json.dumps({"type": "structural_tag", "format": content})
    return StructuredOutputsParams(structural_tag=text, **settings)


def older(schema: Any, **settings: Any) -> StructuredOutputsParams:
    tag = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
    return StructuredOutputsParams(structural_tag=json.dumps(tag), **settings)


def test_the_places_are_all_that_the_library_knows() -> None:
    known = {model.model_fields["type"].default for model in get_args(get_args(Format)[0])}
    assert known == set(PLACES) - {"alone", "tag without a type", "tags within tags"} | (
        LEAVES | HOLDERS
    )


WRONG = {
    "uniqueItems": json_format({"type": "array", "uniqueItems": True}),
    "not": json_format({"$ref": "#/$defs/a", "$defs": {"a": {"not": {"type": "integer"}}}}),
    "contains": json_format({"properties": {"a": {"type": "array", "contains": {"const": 1}}}}),
    "multipleOf": {"type": "qwen_xml_parameter", "json_schema": {"multipleOf": 2}},
    "dependentRequired": json_format({"dependentRequired": {"a": ["b"]}, "minProperties": 1}),
    "maxLength": json_format({"type": "string", "maxLength": 10**6}),
    "'pattern' with the escape '\\A'": json_format({"type": "string", "pattern": "\\Aab"}),
    "no value is valid: 'enum'": json_format({"anyOf": [{"enum": []}]}),
    "no value is valid: 'false'": json_format(False),
    "an object or a boolean": json_format("{}"),
    "an anchor": {"type": "regex", "pattern": "a^b"},
    "Lookahead": {"type": "regex", "pattern": "a(?=b)"},
    "Rule": {"type": "grammar", "grammar": "root ::= other"},
    "a pattern with an anchor": {"type": "grammar", "grammar": "start: /a$b/", "syntax": "lark"},
    "'any_order'": json_format({"properties": {"a": {}}, "required": ["a"]}, any_order=True),
    "'minProperties' together": json_format({"minProperties": 1}, any_order=True),
    "'excludes'": json_format({"type": "string", "pattern": "a*"}, excludes=["aa"]),
    "'maxProperties'": json_format({"type": "object", "maxProperties": 1}, style="minimax_m3_xml"),
    "the field 'pattrn'": {"type": "any_text", "pattrn": "a"},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("words", WRONG)
def test_what_would_be_dropped_is_refused_with_its_name_at_every_place(
    place: str, words: str
) -> None:
    content = PLACES[place](WRONG[words])
    for backend in ("auto", "xgrammar"):
        message = refusal(asked(content), backend)
        assert words in message and "cannot be enforced" in message, message


def test_the_refusal_says_where_it_is() -> None:
    content = PLACES["tags within tags"](WRONG["uniqueItems"])
    place = "#/format/content/elements/0/elements/1/content/json_schema"
    assert place in refusal(asked(content))


@pytest.mark.parametrize("place", PLACES)
def test_what_is_enforced_is_taken_at_every_place(place: str) -> None:
    inner = json_format({"type": "object", "properties": {"a": {"type": "integer"}}})
    for content in (inner, {"type": "regex", "pattern": "^[0-9]+$"}):
        assert validate(asked(PLACES[place](content)))._backend == "xgrammar"


@pytest.mark.parametrize("backend", ["auto", "xgrammar", "guidance"])
@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "contains", "if", "propertyNames"])
def test_the_older_form_refuses_with_the_name_as_well(backend: str, keyword: str) -> None:
    value = {"uniqueItems": True, "propertyNames": {"format": "date"}}.get(keyword, {"const": 1})
    schema = {"type": "array", "items": {keyword: value, "then": {"const": 2}}}
    message = refusal(older(schema), backend)
    assert keyword in message and "#/structures/0/schema: " in message


def test_the_older_form_is_asked_of_the_next_library_and_in_other_words() -> None:
    assert validate(older({"type": "integer"}))._backend == "xgrammar"
    assert validate(older({"type": "integer", "multipleOf": 3}))._backend == "guidance"
    assert validate(older({"type": "string", "maxLength": 10**4}))._backend == "guidance"
    chosen = validate(older({"type": "array", "uniqueItems": False}))
    assert chosen._backend == "xgrammar"
    assert "multipleOf" in refusal(older({"type": "integer", "multipleOf": 3}), "xgrammar")


def test_a_tag_of_both_forms_and_one_that_lacks_a_part_are_refused() -> None:
    both = json.loads(str(older({}).structural_tag)) | {"format": {"type": "any_text"}}
    for backend in ("auto", "xgrammar", "guidance"):
        params = StructuredOutputsParams(structural_tag=json.dumps(both))
        assert "not both" in refusal(params, backend)
    lacking = {"structures": [{"begin": "a"}], "triggers": ["a"]}
    params = StructuredOutputsParams(structural_tag=json.dumps(lacking))
    assert "needs 'begin', 'schema' and 'end'" in refusal(params)


LENGTHS = {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 3}}


@pytest.mark.parametrize("backend", ["auto", "xgrammar"])
def test_lengths_of_strings_are_enforced_in_tags(backend: str) -> None:
    chosen = validate(asked(tag_of(json_format(LENGTHS))), backend)
    text = str(chosen.structural_tag)
    for value, fits in ((["é"], True), (["abc"], True), ([""], False), (["abcd"], False)):
        answer = f"<f>{json.dumps(value, ensure_ascii=False)}</f>"
        assert matches(compiled("xgrammar", Kind.STRUCTURAL_TAG, text), answer) == fits
    assert not matches(compiled("xgrammar", Kind.STRUCTURAL_TAG, text), '<f>["\x01"]</f>')


STYLES = get_args(xgrammar.structural_tag.JSONSchemaFormat.model_fields["style"].annotation)
OBJECT = {"type": "object", "properties": {"x": {"type": "integer"}}}
KEYWORDS: dict[str, tuple[Tag, Any]] = {
    "pattern": ({"type": "string"}, "^[ab]+$"),
    "format": ({"type": "string"}, "date"),
    **{name: ({"type": "integer"}, 3) for name in XGRAMMAR.keywords if "imum" in name},
    "items": ({"type": "array"}, {"type": "integer"}),
    "prefixItems": ({"type": "array"}, [{"type": "integer"}]),
    "minItems": ({"type": "array", "items": {"type": "integer"}}, 2),
    "maxItems": ({"type": "array", "items": {"type": "integer"}}, 2),
    "properties": ({"type": "object"}, {"x": {"type": "integer"}}),
    "required": (OBJECT, ["x"]),
    "additionalProperties": ({**OBJECT, "additionalProperties": True}, False),
    "minProperties": ({"type": "object", "properties": {"x": {}, "y": {}}}, 2),
    "maxProperties": ({"type": "object"}, 2),
    "const": ({}, "x"),
    "enum": ({}, ["x", 1]),
    "anyOf": ({}, [{"type": "integer"}, {"type": "null"}]),
}


@pytest.mark.parametrize("style", STYLES)
def test_no_style_of_json_drops_a_keyword(style: str) -> None:
    """What is taken makes another grammar than the same without the keyword."""

    def grammar(schema: Tag) -> str | None:
        try:
            tag = validate(asked(json_format(schema, style=style)), "xgrammar").structural_tag
        except VLLMValidationError as error:
            assert "cannot be enforced" in str(error)
            return None
        return str(xgrammar.Grammar.from_structural_tag(tag))

    assert set(KEYWORDS) == XGRAMMAR.keywords - {"$ref"}
    taken = 0
    for name, (others, value) in KEYWORDS.items():
        for wrap in (lambda node: node, lambda node: {"type": "array", "items": node}):
            schema = {"type": "object", "properties": {"p": wrap(others)}, "required": ["p"]}
            tied = {**schema, "properties": {"p": wrap({**others, name: value})}}
            made = grammar(tied)
            assert made is None or made != grammar(schema), (style, name)
            taken += made is not None
    assert taken > 20


def test_whitespace_in_tags_comes_to_an_end_and_may_be_forbidden() -> None:
    text = str(asked(json_format({"type": "array", "items": {"type": "null"}})).structural_tag)
    grammar = compiled("xgrammar", Kind.STRUCTURAL_TAG, text)
    assert grammar.accept_tokens("r", ids("["))
    blanks = 0
    while ids(" ")[0] in allowed(grammar):
        assert grammar.accept_tokens("r", ids(" "))
        blanks += 1
        assert blanks < 100
    for answer, fits in (("[null,null]", True), ("[null, null]", False), ("[ null]", False)):
        tight = compiled("xgrammar", Kind.STRUCTURAL_TAG, text, disable_any_whitespace=True)
        assert matches(tight, answer) == fits


def test_settings_that_tags_cannot_keep_are_refused_with_their_name() -> None:
    plain = json_format({"type": "integer"})
    assert validate(asked(plain, disable_any_whitespace=True))._backend == "xgrammar"
    styled = json_format({"type": "object"}, style="qwen_xml")
    message = refusal(asked(styled, disable_any_whitespace=True))
    assert "'disable_any_whitespace' together with 'style'" in message
    assert "'whitespace_pattern'" in refusal(asked(tag_of(plain), whitespace_pattern=" ?"))
    assert validate(older({"type": "integer"}, whitespace_pattern="[ ]?"))._backend == "guidance"


def test_names_within_a_schema_are_no_places_of_the_tag() -> None:
    names = {"json_schema": {"type": "string"}, "pattern": {"type": "integer"}, "type": {}}
    content = json_format({"type": "object", "properties": names})
    assert [part.path for part in parts_of({"format": content})] == ["#/format/json_schema"]
    assert validate(asked(content))._backend == "xgrammar"


BY_TOKEN: dict[str, Tag] = {
    "token": {"type": "sequence", "elements": [{"type": "token", "token": "x"}, TEXT]},
    "tag": {**tag_of(TEXT), "begin": {"type": "token", "token": "x"}, "end": "</f>"},
    "exclude_token": {"type": "exclude_token", "exclude_tokens": ["x", "hello"]},
    "any_tokens": {"type": "any_tokens", "exclude_tokens": [3, "x"]},
    "token_triggered_tags": {
        "type": "token_triggered_tags",
        "trigger_tokens": ["x"],
        "exclude_tokens": ["y"],
        "tags": [{**tag_of(TEXT), "begin": {"type": "token", "token": "x"}}],
    },
    "token_dispatch": {"type": "token_dispatch", "rules": [["x", TEXT]], "exclude_tokens": ["y"]},
}


@pytest.mark.parametrize("kind", BY_TOKEN)
def test_tokens_may_be_named_by_their_text(kind: str) -> None:
    said = json.dumps(BY_TOKEN[kind])
    text = str(validate(asked(BY_TOKEN[kind])).structural_tag)
    for name in ("x", "y", "hello"):
        said = said.replace(f'"begin": "{name}"', "").replace(f'"{name}"', str(ids(name)[0]))
    made = json.dumps(json.loads(text)["format"])
    assert made == said.replace(f'"value": {ids("x")[0]}', '"value": "x"')
    assert allowed(compiled("xgrammar", Kind.STRUCTURAL_TAG, text))


def test_a_text_that_is_no_token_is_refused_with_its_place() -> None:
    message = refusal(asked({"type": "sequence", "elements": [{"type": "token", "token": "ab🔥"}]}))
    assert "'ab🔥' (at #/format/elements/0) is no token of this model" in message
