# SPDX-License-Identifier: Apache-2.0
"""Who enforces a constraint, and what is said where nobody can."""

import copy
import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
from structured_helpers import Kind, refusal, validate
from structured_helpers import backend as backend_of

from vllmx.config import StructuredOutputsConfig
from vllmx.engine.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllmx.exceptions import UserError, VLLMValidationError
from vllmx.sampling_params import SamplingParams, StructuredOutputsParams
from vllmx.structured_output import utils, validation
from vllmx.structured_output.compilation import Attempts
from vllmx.structured_output.utils import (
    choice_as_grammar,
    compile_regex_with_timeout,
    convert_lark_to_ebnf,
    grammar_is_likely_lark,
)
from vllmx.structured_output.validation import validate_structured_outputs

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMES = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")


@pytest.mark.parametrize(
    ("constraint", "backend"),
    [
        ({"json": OBJECT}, "xgrammar"),
        ({"json": json.dumps(OBJECT)}, "xgrammar"),
        ({"json_object": True}, "xgrammar"),
        ({"regex": "[0-9]+"}, "xgrammar"),
        ({"regex": "^a$|^b$"}, "xgrammar"),
        ({"regex": r"\Aab\z"}, "guidance"),
        ({"json": {"type": "string", "pattern": r"\Aab\z"}}, "guidance"),
        ({"choice": ["a", "b"]}, "xgrammar"),
        ({"grammar": 'root ::= "a"'}, "xgrammar"),
        ({"grammar": 'start: "a" | "b"'}, "xgrammar"),
        ({"grammar": "start: /[ab]+/"}, "guidance"),
        ({"json": {"type": "integer", "multipleOf": 3}}, "guidance"),
        ({"json": {"type": "string", "pattern": "^a+$", "maxLength": 3}}, "guidance"),
        ({"json": {"patternProperties": {"^a": {"type": "integer"}}}}, "guidance"),
        ({"json": OBJECT, "whitespace_pattern": "[ ]?"}, "guidance"),
    ],
    ids=str,
)
def test_auto_asks_one_library_after_the_other(constraint: dict, backend: str) -> None:
    chosen = validate(StructuredOutputsParams(**constraint))
    assert chosen._backend == backend and chosen._backend_was_auto


def test_parameters_of_the_caller_stay_as_they_are_and_may_be_used_again() -> None:
    params = StructuredOutputsParams(choice=["a", "b"])
    before = copy.deepcopy(params)
    chosen = validate(params)
    assert params == before and chosen.choice is None and chosen.grammar == 'root ::= "a" | "b"'
    assert validate(chosen)._backend == "xgrammar"


def test_a_request_does_not_choose_the_backend() -> None:
    params = StructuredOutputsParams(regex="a")
    params._backend = "outlines"
    assert "'outlines', but vLLM was initialised with 'auto'" in refusal(params)
    assert validate(params, "outlines")._backend == "outlines"


@pytest.mark.parametrize("keyword", ["contains", "not", "if", "uniqueItems", "oneOf"])
@pytest.mark.parametrize("place", ["top", "items", "property", "anyOf"])
def test_what_no_library_enforces_is_refused_with_its_name(keyword: str, place: str) -> None:
    value = {"contains": {"const": 1}, "not": {"const": 1}, "if": {"const": 1}}.get(keyword)
    if keyword == "uniqueItems":
        value = True
    if keyword == "oneOf":
        value = [{"minimum": 1}, {"maximum": 5}]
    inner = {keyword: value, **({"then": {"const": 2}} if keyword == "if" else {})}
    schema = {
        "top": inner,
        "items": {"type": "array", "items": inner},
        "property": {"type": "object", "properties": {"p": inner}, "required": ["p"]},
        "anyOf": {"anyOf": [{"type": "null"}, inner]},
    }[place]
    for backend in ("auto", *NAMES):
        message = refusal(StructuredOutputsParams(json=schema), backend)
        assert keyword in message and "cannot be enforced" in message


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"choice": []}, "cannot be an empty list"),
        ({"choice": [""]}, "strings that are not empty"),
        ({"choice": "ab"}, "choice must be a list of strings"),
        ({"json": ""}, "json cannot be an empty string"),
        ({"json": "{"}, "Invalid JSON grammar specification"),
        ({"json": "3"}, "a JSON schema is an object or a boolean"),
        ({"json": 3}, "got 3 of type int"),
        ({"json": {"a": b""}}, "json is no JSON: Object of type bytes"),
        ({"json_object": "x"}, "json_object must be true or false, got x of type str"),
        ({"json_object": 1}, "json_object must be true or false, got 1 of type int"),
        ({"regex": "a", "whitespace_pattern": ["a"]}, "whitespace_pattern must be text"),
        ({"regex": "a", "disable_any_whitespace": "zz"}, "disable_any_whitespace must be true"),
        ({"json": False}, "xgrammar: no value is valid: 'false' (at #); guidance: no value"),
        ({"regex": " "}, "regex cannot be an empty string"),
        ({"regex": "("}, "xgrammar: "),
        ({"regex": "a^b"}, "xgrammar does not enforce an anchor ('^') behind other characters"),
        ({"regex": r"[\q]"}, r"xgrammar does not enforce the escape '\q'"),
        ({"grammar": "  "}, "grammar cannot be an empty string"),
        ({"grammar": "root ::= other"}, "Invalid grammar specification"),
        ({"json_object": False}, "json_object must be True"),
        ({"structural_tag": "{}"}, "Invalid structural tag specification"),
        ({"structural_tag": "nonsense"}, "Invalid structural tag specification"),
    ],
    ids=str,
)
def test_malformed_constraints_are_refused_in_words(constraint: dict, words: str) -> None:
    message = refusal(constraint)
    assert words in message and "\n;" not in message and ".cc:" not in message


def test_without_a_tokenizer_nothing_can_be_constrained() -> None:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(VLLMValidationError, match="skip_tokenizer_init"):
        validate_structured_outputs(params, SimpleNamespace(), StructuredOutputsConfig(), None)


@pytest.mark.parametrize("backend", ["outlines", "lm-format-enforcer"])
def test_two_libraries_have_no_grammars_and_no_compact_json(backend: str) -> None:
    assert "grammar spec" in refusal(StructuredOutputsParams(grammar='root ::= "a"'), backend)
    assert "grammar spec" in refusal(StructuredOutputsParams(structural_tag='{"a": 1}'), backend)
    compact = StructuredOutputsParams(json=OBJECT, disable_any_whitespace=True)
    assert "disable_any_whitespace is only supported" in refusal(compact, backend)


@pytest.mark.parametrize(
    "pattern",
    [
        *(r"(a)\1", "(?=a)b", r"\ba", "^a", "(^a|b)", "(?:a*|^b)", "a(?!b)"),
        *("a^b", "a$b", "(a$|b)c", r"ab\Z", "a(^|b)"),
    ],
)
def test_outlines_refuses_patterns_that_need_more_than_an_automaton(pattern: str) -> None:
    assert refusal(StructuredOutputsParams(regex=pattern), "outlines")
    assert validate(StructuredOutputsParams(regex="a(b|c)*$"), "outlines")


def test_enforcer_takes_no_characters_that_tokens_hold_in_part() -> None:
    name = "lm-format-enforcer"
    assert "ASCII" in refusal(StructuredOutputsParams(choice=["да"]), name)
    assert "ASCII" in refusal(StructuredOutputsParams(json={"enum": ["é"]}), name)
    noted = {"type": "string", "description": "é"}
    assert validate(StructuredOutputsParams(json=noted), name)


def test_settings_of_the_server_hold_for_its_requests() -> None:
    params = StructuredOutputsParams(json=OBJECT)
    assert validate(params, "xgrammar", disable_any_whitespace=True).disable_any_whitespace
    chosen = validate(params, "guidance", disable_additional_properties=True)
    assert chosen.disable_additional_properties and not params.disable_additional_properties
    with pytest.raises(UserError, match="disable_any_whitespace is only supported"):
        StructuredOutputsConfig(backend="outlines", disable_any_whitespace=True)
    with pytest.raises(UserError, match="only supported for the guidance"):
        StructuredOutputsConfig(disable_additional_properties=True)


def test_lark_becomes_ebnf() -> None:
    lark = """
    // a comment
    start: greeting " " name   # another
    greeting: "hello" | 'say "hi"'
        | other~2..3
    ?other: ("x" | [a-z])+
    name: "Jo"*
    """
    assert convert_lark_to_ebnf(lark).split("\n") == [
        "root ::= start",
        'start ::= greeting " " name',
        'greeting ::= "hello" | "say \\"hi\\"" | other {2, 3}',
        'other ::= ( "x" | [a-z] ) +',
        'name ::= "Jo" *',
    ]
    assert grammar_is_likely_lark(lark) and not grammar_is_likely_lark('root ::= "a"')
    assert not grammar_is_likely_lark("")


@pytest.mark.parametrize(
    ("lark", "words"),
    [
        ('start: "a', "Mismatched quotes in rule 'start' on line 1"),
        ("start: a b", "Referenced rules are not defined: a, b"),
        ('| "a"', "without a preceding rule definition"),
        ("just words", "No valid rules found in grammar"),
        ("// nothing", "No valid rules found in grammar"),
        ("", "Grammar string cannot be empty"),
        ("start: /a+/", "cannot be written in EBNF"),
        ("%import common.WS", "cannot be written in EBNF"),
        (3, "Grammar must be a string"),
    ],
)
def test_lark_that_cannot_be_ebnf_says_why(lark, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        convert_lark_to_ebnf(lark)


def test_choices_are_escaped_in_ebnf() -> None:
    assert choice_as_grammar(['a"', "\\", "\nb"]) == 'root ::= "a\\"" | "\\\\" | "\\u000ab"'


def test_a_pattern_that_takes_for_ever_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(utils, "VLLM_REGEX_COMPILATION_TIMEOUT_S", 0.02)
    with pytest.raises(ValueError, match=r"timed out after 0.02s.*\(a\+\)\+"):
        compile_regex_with_timeout(lambda pattern: time.sleep(0.3), "(a+)+")
    with pytest.raises(KeyError):
        compile_regex_with_timeout(lambda pattern: {}[pattern], "a")
    monkeypatch.setattr(utils, "VLLM_REGEX_COMPILATION_TIMEOUT_S", 0)
    assert compile_regex_with_timeout(lambda pattern: "done", "a") == "done"


def test_a_pattern_that_was_given_up_is_refused_at_once_and_not_begun_again(monkeypatch) -> None:
    monkeypatch.setattr(utils, "VLLM_REGEX_COMPILATION_TIMEOUT_S", 0.02)
    monkeypatch.setattr(utils, "_patterns", Attempts(4))
    release, begun = threading.Event(), []

    def slow(pattern: str) -> str:
        begun.append(pattern)
        release.wait(20)
        return pattern

    for _ in range(3):
        with pytest.raises(ValueError, match=r"timed out after 0.02s.*\(a\+\)\+"):
            compile_regex_with_timeout(slow, "(a+)+")
    assert begun == ["(a+)+"]
    for pattern in ("(c+)+", "(d+)+", "(e+)+"):
        with pytest.raises(ValueError, match="timed out"):
            compile_regex_with_timeout(slow, pattern)
    with pytest.raises(ValueError, match=r"4 patterns .* Send it again later. Pattern: \(b\+\)\+"):
        compile_regex_with_timeout(slow, "(b+)+")
    assert len(begun) == 4
    release.set()
    monkeypatch.setattr(utils, "VLLM_REGEX_COMPILATION_TIMEOUT_S", 10)
    assert compile_regex_with_timeout(slow, "(b+)+") == "(b+)+"
    # What the first thread came to after all is there for whoever asks now.
    utils._patterns._attempts[slow, "(a+)+"].result.result(10)
    assert compile_regex_with_timeout(slow, "(a+)+") == "(a+)+" and begun.count("(a+)+") == 1


def test_every_library_knows_the_pattern_that_it_has_begun(monkeypatch) -> None:
    """Its work has the same name each time."""
    asked, run = [], Attempts.run

    def note(self, key, *args, **kwargs):
        asked.append(key)
        return run(self, key, *args, **kwargs)

    monkeypatch.setattr(Attempts, "run", note)
    for name in NAMES:
        for _ in range(2):
            validation._choose.cache_clear()
            validate(StructuredOutputsParams(regex="[0-9]{2}"), name)
            made = backend_of(name)
            made.compile_grammar(Kind.REGEX, "[0-9]{2}")
            vars(made).get("_indexes", {}).clear()
    # Both at validation and at compilation, but for llguidance, which is never slow.
    assert len(asked) == 8 and len(set(asked)) == 4


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {},
        True,
        {"type": "array"},
        {"type": "array", "items": {}},
        {"type": "object", "properties": {"a": True}},
        {"type": ["null", "object"]},
        {"anyOf": [{"type": "null"}, {"type": "array", "minItems": 1}]},
    ],
    ids=str,
)
def test_outlines_refuses_what_it_would_compile_for_minutes(schema) -> None:
    message = refusal(StructuredOutputsParams(json=json.dumps(schema)), "outlines")
    assert "features not supported by outlines: " in message and "(at #" in message
    assert validate(StructuredOutputsParams(json=OBJECT), "outlines")


WORDS = [
    "type",
    "string",
    "object",
    "array",
    "properties",
    "items",
    "enum",
    "$ref",
    "#",
    "#/$defs/a",
]
WORDS += ["required", "pattern", "(", "^a*", "minimum", "maxLength", "anyOf", "allOf", "$defs"]
WORDS += ["const", "additionalProperties", "prefixItems", "format", "date", "\ud83d", "", "a"]


def nonsense(rng: random.Random, depth: int = 0):
    kind = rng.randrange(8 if depth < 4 else 5)
    if kind < 2:
        return rng.choice(WORDS)
    if kind < 5:
        return rng.choice([None, True, False, -1, 0, 3, 1e300, 2.5, [], {}, 10**30])
    if kind == 5:
        return [nonsense(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {rng.choice(WORDS): nonsense(rng, depth + 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("seed", range(8))
def test_nonsense_is_refused_or_taken_and_never_raises_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(25):
        value = nonsense(rng)
        name = rng.choice(["json", "regex", "choice", "grammar", "structural_tag"])
        if name == "json" and not isinstance(value, (dict, str)):
            value = {"type": value}
        if name in ("regex", "grammar", "structural_tag") and rng.random() < 0.8:
            value = (
                json.dumps(value)
                if name != "regex"
                else "".join(rng.choices("a(|)*+[]\\{}?1", k=6))
            )
        if value is None:
            continue
        try:
            validate(StructuredOutputsParams(**{name: value}), rng.choice(["auto", *NAMES]))
        except VLLMValidationError as error:
            assert str(error)


EXTREME = (2**63, 2**70, -(2**70), 10**400, 1e308, 0, True, None)
KEYWORDS = ("maximum", "minimum", "maxLength", "minItems", "enum", "const", "title", "x-note")


@pytest.mark.parametrize("backend", ["auto", *NAMES])
def test_a_schema_that_is_taken_reaches_the_engine_whatever_numbers_it_holds(backend: str) -> None:
    taken = 0
    schemas: list = [
        {
            "type": "integer" if name.endswith("imum") else "string",
            name: [value] if name == "enum" else value,
        }
        for name in KEYWORDS
        for value in EXTREME
    ]
    for schema in (*schemas, True, OBJECT, json.dumps(OBJECT)):
        try:
            chosen = validate(StructuredOutputsParams(json=schema), backend)
        except VLLMValidationError as error:
            assert error.parameter == "structured_outputs"
            continue
        taken += 1
        sent = MsgpackEncoder().encode(chosen)
        arrived = MsgpackDecoder(StructuredOutputsParams).decode(sent)
        assert arrived.json == chosen.json and isinstance(arrived.json, str)
    assert taken > 10


def test_what_cannot_even_be_written_is_refused_in_words() -> None:
    assert "regex must be text of valid Unicode" in refusal({"regex": "\ud800"})
    assert "json is no JSON: Exceeds the limit" in refusal({"json": {"a": 10**5000}})


def test_fields_that_were_set_later_are_checked_too() -> None:
    for name, value in (("json", 3), ("json_object", "x"), ("whitespace_pattern", 5)):
        params = StructuredOutputsParams(json_object=True)
        params.json_object = None if name == "json" else True
        setattr(params, name, value)
        assert name in refusal(params)


def test_schemas_nested_beyond_measure_are_refused_or_taken() -> None:
    for depth in (50, 3000):
        schema: dict = {"type": "integer"}
        for _ in range(depth):
            schema = {"type": "array", "items": schema}
        text = '{"type": "array", "items": ' * depth + '{"type": "integer"}' + "}" * depth
        for backend in NAMES[:2]:
            try:
                validate(StructuredOutputsParams(json=text), backend)
            except VLLMValidationError as error:
                assert depth > 100 and str(error)
