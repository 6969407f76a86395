# SPDX-License-Identifier: Apache-2.0
"""Random schemas and random walks: what is taken is enforced, and jsonschema is the judge."""

import json
import random
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
from structured_helpers import BACKENDS, END, TOKENIZER, Kind, allowed, compiled, ids, matches

from vllmx.config import StructuredOutputsConfig
from vllmx.exceptions import VLLMValidationError
from vllmx.sampling_params import SamplingParams, StructuredOutputsParams
from vllmx.structured_output.backend_outlines import pattern_of
from vllmx.structured_output.backend_types import JSONOptions
from vllmx.structured_output.validation import validate_structured_outputs

VALUES: list[Any] = [
    None,
    True,
    0,
    1,
    2,
    1.25,
    1.5,
    -1,
    -3,
    "",
    "a",
    "ab\t",
    [],
    [1],
    ["a", 1],
    {},
    {"a": 1},
]
TEXTS = [json.dumps(value) for value in VALUES] + ['"a\t"', '"\x01"', '{"a":', "[ ]", "-", "01"]
PATTERNS = ["^[ab]*$", "^.+$", "^[^a]$", '^a"?$', "^[ -~]$", "^[!-z]+$"]
CLOSERS = {token for sign in '"}]0' for token in ids(sign)}
PLAIN = {token for token in range(len(TOKENIZER)) if TOKENIZER.decode([token]).isascii()}


def choose(name: str, schema: Any) -> tuple[str, str]:
    """(backend, schema) that a server takes for `schema`."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(json=schema))
    config = StructuredOutputsConfig(backend=name)
    validate_structured_outputs(params, SimpleNamespace(), config, object())
    chosen = params.structured_outputs
    assert chosen is not None and chosen._backend is not None
    spec = chosen.json if isinstance(chosen.json, str) else json.dumps(chosen.json)
    return chosen._backend, spec


def random_schema(rng: random.Random, depth: int = 0, deepest: int = 2) -> Any:
    def some(**keywords: Any) -> dict[str, Any]:
        return {name: keywords[name] for name in keywords if rng.random() < 0.4}

    def inner() -> Any:
        return random_schema(rng, depth + 1, deepest)

    bound = [-6, -1.5, -1, 0, 0.5, 1, 1.5, 3]
    kind = rng.randrange(9 if depth < deepest else 5)
    if kind == 0:
        lengths = some(minLength=rng.randrange(2), maxLength=rng.randrange(1, 4))
        return {"type": "string", **(lengths or some(pattern=rng.choice(PATTERNS), format="date"))}
    if kind == 1:
        lower, upper = (("m", "exclusiveM")[rng.randrange(2)] for _ in "ab")
        chosen = some(**{f"{lower}inimum": rng.choice(bound), f"{upper}aximum": rng.choice(bound)})
        return {"type": rng.choice(["number", "integer"]), **chosen, **some(multipleOf=3)}
    if kind == 2:
        return {"enum": rng.sample([1, None, "a", "b", True, {"a": 1}, [1]], rng.randrange(4))}
    if kind == 3:
        return {"const": rng.choice([1, None, "a", False, [1]])}
    if kind == 4:
        return rng.choice([{"type": "null"}, {"type": []}, {"type": ["string", "null"]}, {}])
    if kind == 5:
        return {"anyOf": [inner() for _ in range(rng.randrange(3))]}
    if kind == 6:
        prefix, counts = [inner()], {"minItems": rng.randrange(2), "maxItems": rng.randrange(1, 3)}
        keywords = some(prefixItems=prefix, items=inner(), additionalItems=False)
        return {"type": "array", **keywords, **some(**counts)}
    names = rng.sample("ab", rng.randrange(3))
    return {
        "type": "object",
        "properties": {name: inner() for name in names},
        **some(required=names, additionalProperties=False, maxProperties=2),
    }


def walk(grammar: Any, rng: random.Random) -> bytes | None:
    """An answer by the bitmasks, of tokens at random that tend to end it; None if it grows long.
    It never comes to a place where nothing is allowed."""
    tokens: list[int] = []
    while len(tokens) < 60:
        may = allowed(grammar)
        assert may, TOKENIZER.decode(tokens)
        ends = sorted(may & {END, *(CLOSERS if len(tokens) > 5 else ())})
        plain = sorted(may & PLAIN) or sorted(may)
        token = rng.choice(ends if ends and rng.random() < 0.5 else plain)
        assert grammar.accept_tokens("r", [token])
        if token == END:
            return TOKENIZER.decode(tokens).encode()
        tokens.append(token)
    return None


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_random_schemas_are_refused_or_enforced(name: str) -> None:
    rng = random.Random(5)
    taken = ended = 0
    while taken < 30:
        schema = random_schema(rng, deepest=1 if name == "outlines" else 2)
        try:
            backend, spec = choose(name, schema)
        except VLLMValidationError:
            continue
        if backend == "outlines" and len(pattern_of(Kind.JSON, spec, JSONOptions())) > 5000:
            continue  # it takes seconds to compile
        taken += 1
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(3):
            answer = walk(compiled(backend, Kind.JSON, spec), rng)
            if answer is not None:
                ended += 1
                assert validator.is_valid(json.loads(answer)), (schema, answer)
        for text in rng.sample(TEXTS, 8):
            if matches(compiled(backend, Kind.JSON, spec), text):
                assert validator.is_valid(json.loads(text)), (schema, text)
    assert ended > 30


STRINGS = [
    {"type": "string"},
    {"type": "string", "maxLength": 6},
    {"type": "string", "minLength": 1},
]
STRINGS += [{"type": "string", "pattern": "^.*$"}, {"type": "string", "pattern": "^[^a]+$"}, True]


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
def test_no_string_holds_a_control_character(name: str) -> None:
    signs = {token for code in range(32) for token in ids(chr(code))}
    assert len(signs) == 32
    taken = 0
    for inner in STRINGS:
        schema = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        try:
            backend, spec = choose(name, schema)
        except VLLMValidationError:
            continue
        taken += 1
        for start in ('{"a":"', '{"a": "b'):
            grammar = compiled(backend, Kind.JSON, spec)
            if grammar.accept_tokens("r", ids(start)):
                assert not allowed(grammar) & signs, (backend, inner)
    assert taken >= 2


@pytest.mark.parametrize("name", ["auto", *BACKENDS])
@pytest.mark.parametrize("keyword", ["enum", "anyOf", "oneOf", "allOf", "type"])
def test_a_list_of_no_choices_is_refused_by_name_wherever_it_is(name: str, keyword: str) -> None:
    empty = {keyword: []}
    for schema in (
        empty,
        {"type": "object", "properties": {"a": empty}, "required": ["a"]},
        {"type": "array", "minItems": 1, "items": empty},
    ):
        with pytest.raises(VLLMValidationError, match=f"'{keyword}' is an empty list"):
            choose(name, schema)


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "integer", "multipleOf": 3, "maximum": -1}, "multipleOf"),
        ({"multipleOf": 3, "allOf": [{"exclusiveMaximum": 0}]}, "multipleOf"),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, "exclusiveMinimum"),
        ({"exclusiveMaximum": -1, "exclusiveMinimum": -1.5}, "exclusiveMaximum"),
        ({"exclusiveMinimum": 0, "allOf": [{"exclusiveMaximum": 0.5}]}, "exclusiveMinimum"),
    ],
)
def test_numbers_that_guidance_misreads_are_refused(schema: Any, keyword: str) -> None:
    for name in ("guidance", "auto"):
        with pytest.raises(VLLMValidationError, match=keyword):
            choose(name, schema)


def test_items_beside_a_prefix_count_and_others_do_not() -> None:
    schema = {"type": "array", "prefixItems": [{"type": "string"}], "additionalItems": False}
    for rest, text, is_valid in (
        ({}, "[1,2,3]", False),
        ({}, '["a",2,3]', True),
        ({"type": "integer"}, '["a","b"]', False),
    ):
        for name in ("guidance", "auto"):
            backend, spec = choose(name, {**schema, "items": rest})
            assert matches(compiled(backend, Kind.JSON, spec), text) is is_valid


@pytest.mark.parametrize("inner", [{"enum": [1, None]}, {"const": 1}, {"enum": ["a", 1]}], ids=str)
def test_enforcer_takes_no_values_but_strings_at_any_depth(inner: Any) -> None:
    for schema in (inner, {"type": "object", "properties": {"a": inner}, "required": ["a"]}):
        with pytest.raises(VLLMValidationError, match="values that are no strings"):
            choose("lm-format-enforcer", schema)
