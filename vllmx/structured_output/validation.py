# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/sampling_params.py (_validate_structured_outputs),
#   vllm/v1/structured_output/backend_*.py @ v0.25.0
"""Whether a constraint can be enforced, and by which library; asked before a request is queued.

A constraint that is let through is enforced as a whole: what a library would drop silently is
refused, and with backend `auto` the next library is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from vllmx.exceptions import VLLMValidationError
from vllmx.structured_output.backend_types import JSONOptions, StructuredOutputOptions
from vllmx.structured_output.patterns import misread_by_xgrammar
from vllmx.structured_output.request import get_structured_output_key
from vllmx.structured_output.schema_features import (
    ENFORCER,
    OUTLINES,
    XGRAMMAR,
    SchemaSupport,
    empty_list,
    misread_by_guidance,
    texts_of,
    unsupported_feature,
)
from vllmx.structured_output.schema_rewrite import lengths_as_patterns, rewrite_schema
from vllmx.structured_output.structural_tags import (
    parse_structural_tag,
    parts_of,
    refused_by_xgrammar,
    unknown_field,
    with_schemas,
    with_token_ids,
)
from vllmx.structured_output.utils import (
    choice_as_grammar,
    compile_regex_with_timeout,
    convert_lark_to_ebnf,
    grammar_is_likely_lark,
)

if TYPE_CHECKING:
    from vllmx.config import StructuredOutputsConfig
    from vllmx.sampling_params import SamplingParams, StructuredOutputsParams

Kind = StructuredOutputOptions
AUTO = ("xgrammar", "guidance", "outlines")
"""Libraries in the order in which backend `auto` asks them."""


def validate_structured_outputs(
    params: SamplingParams,
    model_config: Any,
    config: StructuredOutputsConfig | None,
    tokenizer: Any | None,
) -> None:
    """Choose the backend of `params.structured_outputs`, which becomes a copy that names it.

    Lark and choices become EBNF where the backend wants it, and a schema that no backend enforces
    one of the same meaning that one does. VLLMValidationError for a constraint that no backend in
    question enforces, with what it lacks.
    """
    asked = params.structured_outputs
    if config is None or asked is None:
        return
    if getattr(model_config, "is_diffusion", False):
        raise _error(
            "Structured outputs are not yet supported for diffusion language models. Remove the "
            "structured output constraint (e.g. `response_format`, `structured_outputs`) from the "
            "request."
        )
    if tokenizer is None:
        raise _error(
            "Structured outputs requires a tokenizer so it can't be used with 'skip_tokenizer_init'"
        )
    _check_backend(asked, config.backend)
    chosen = replace(asked)  # checks the types again, as fields may have been set since
    _check_content(chosen)
    chosen.disable_any_whitespace |= config.disable_any_whitespace
    chosen.disable_additional_properties |= config.disable_additional_properties
    try:
        kind, given = get_structured_output_key(chosen)
    except (TypeError, ValueError, RecursionError) as error:
        raise _error(f"structured_outputs.json is no JSON: {error}.") from None
    if kind == Kind.STRUCTURAL_TAG:
        try:
            given = with_token_ids(given, tokenizer)
        except ValueError as error:
            raise _error(str(error)) from error
    backend, kind, spec = _choose(config.backend, kind, given, json_options(chosen))
    if kind == Kind.GRAMMAR:
        chosen.choice, chosen.grammar = None, spec
    elif kind == Kind.JSON:
        chosen.json = spec  # text reaches the engine's process whatever numbers it holds
    elif kind == Kind.STRUCTURAL_TAG:
        chosen.structural_tag = spec
    chosen._backend, chosen._backend_was_auto = backend, config.backend == "auto"
    params.structured_outputs = chosen


def json_options(params: StructuredOutputsParams) -> JSONOptions:
    """How the JSON of a request may be written."""
    return JSONOptions(
        params.disable_any_whitespace,
        params.disable_additional_properties,
        params.whitespace_pattern,
    )


def _error(message: str) -> VLLMValidationError:
    return VLLMValidationError(message, parameter="structured_outputs")


def _check_backend(asked: StructuredOutputsParams, backend: str) -> None:
    """Parameters that are used again may name the backend that was chosen for them before."""
    named = asked._backend
    if named and named != backend and not (backend == "auto" and asked._backend_was_auto):
        raise _error(
            "Request-level structured output backend selection is not supported. The request "
            f"specified '{named}', but vLLM was initialised with '{backend}'. This error can be "
            "resolved by removing '_backend' from the request."
        )


def _check_content(asked: StructuredOutputsParams) -> None:
    if asked.choice is not None:
        if not asked.choice:
            raise _error(f"Choice '{asked.choice}' cannot be an empty list")
        if not all(asked.choice):
            raise _error(f"Choice {asked.choice!r} must hold strings that are not empty.")
    if asked.json_object is False:
        raise _error(
            "structured_outputs.json_object must be True if set; omit structured_outputs to "
            "disable structured outputs"
        )
    for name in ("json", "regex", "grammar", "structural_tag"):
        value = getattr(asked, name)
        if isinstance(value, str) and not value.strip():
            raise _error(f"structured_outputs.{name} cannot be an empty string")


@lru_cache(maxsize=512)
def _choose(
    backend: str, kind: StructuredOutputOptions, spec: str, options: JSONOptions
) -> tuple[str, StructuredOutputOptions, str]:
    """(backend, kind, text) that enforce a constraint, the last two as the backend takes them."""
    reasons: list[str] = []
    for text in _ways_to_say(kind, spec):
        found = _ask(backend, kind, text, options, reasons)
        if found is not None:
            return found
    raise _error(f"The constraint ({kind.name.lower()}) cannot be enforced. " + "; ".join(reasons))


def _ways_to_say(kind: Kind, spec: str) -> Iterator[str]:
    """`spec`, then what it means in the words that libraries know, if that is something else."""
    yield spec
    if kind not in (Kind.JSON, Kind.STRUCTURAL_TAG):
        return
    try:
        given = _parse_schema(spec) if kind == Kind.JSON else json.loads(spec)
        said = json.dumps(given, ensure_ascii=False)
        for change in (rewrite_schema, lengths_as_patterns):
            given = change(given) if kind == Kind.JSON else with_schemas(given, change)
            before, said = said, json.dumps(given, ensure_ascii=False)
            if said != before:
                yield said
    except (ValueError, RecursionError):
        return  # the libraries have said what is wrong with it


def _ask(
    backend: str, kind: Kind, spec: str, options: JSONOptions, reasons: list[str]
) -> tuple[str, Kind, str] | None:
    """What `_choose` gives, or None: then `reasons` has what each library lacks, of the first way
    to say it."""
    first = not reasons
    for name in AUTO if backend == "auto" else (backend,):
        try:
            return name, *_CHECKS[name](kind, spec, options)
        except RecursionError:
            reason = "it is nested too deep"
        except Exception as error:  # of three libraries, each with errors of its own
            reason = _said(error)
        if first:
            reasons.append(f"{name}: {reason}")
    return None


_OF_XGRAMMAR = re.compile(r"\[\d+:\d+:\d+\] \S+\.cc:\d+: ")
"""The time and a place in its own source, which its messages have before what they say."""


def _said(error: Exception) -> str:
    return _OF_XGRAMMAR.sub("", str(error)).strip() or type(error).__name__


def _check_xgrammar(kind: Kind, spec: str, options: JSONOptions) -> tuple[Kind, str]:
    import xgrammar

    if options.whitespace_pattern is not None and kind == Kind.JSON:
        raise ValueError("'whitespace_pattern' is not supported")
    grammar = xgrammar.Grammar
    if kind == Kind.REGEX:
        compile_regex_with_timeout(grammar.from_regex, spec)
        if misread := misread_by_xgrammar(spec):
            raise ValueError(f"xgrammar does not enforce {misread}")
    elif kind == Kind.CHOICE:
        kind, spec = Kind.GRAMMAR, choice_as_grammar(json.loads(spec))
        grammar.from_ebnf(spec)
    elif kind == Kind.JSON:
        _check_schema(spec, XGRAMMAR)
        grammar.from_json_schema(spec)
    elif kind == Kind.GRAMMAR:
        if grammar_is_likely_lark(spec):
            try:
                spec = convert_lark_to_ebnf(spec)
            except ValueError as error:
                raise ValueError(
                    f"Failed to convert the grammar from Lark to EBNF. {error}"
                ) from error
        try:
            grammar.from_ebnf(spec)
        except Exception as error:
            raise ValueError(f"Invalid grammar specification. {error}") from error
    elif kind == Kind.STRUCTURAL_TAG:
        try:
            _check_tag_of_xgrammar(spec, options)
        except Exception as error:
            raise ValueError(f"Invalid structural tag specification. {error}") from error
    return kind, spec


def _check_tag_of_xgrammar(spec: str, options: JSONOptions) -> None:
    import xgrammar

    from vllmx.structured_output.backend_xgrammar import structural_tag_text

    tag = parse_structural_tag(spec)
    if unknown := unknown_field(tag):
        raise ValueError(f"xgrammar does not know {unknown}")
    for part in parts_of(json.loads(spec)):  # at the places that the caller knows
        try:
            if part.kind == Kind.JSON:
                _check_shape(part.value)
                if options.whitespace_pattern is not None:
                    raise ValueError("'whitespace_pattern' is not supported")
            elif part.kind == Kind.REGEX and isinstance(part.value, str):
                compile_regex_with_timeout(xgrammar.Grammar.from_regex, part.value)
            if feature := refused_by_xgrammar(part):
                raise ValueError(f"xgrammar does not enforce {feature}")
        except Exception as error:
            raise ValueError(f"{part.path}: {error}") from error
    xgrammar.Grammar.from_structural_tag(structural_tag_text(spec, options.disable_any_whitespace))


def _check_guidance(kind: Kind, spec: str, options: JSONOptions) -> tuple[Kind, str]:
    from llguidance import LLMatcher

    from vllmx.structured_output.backend_guidance import serialize_guidance_grammar

    if kind == Kind.JSON and (feature := misread_by_guidance(_parse_schema(spec))):
        raise ValueError(
            f"The provided JSON schema contains features not supported by guidance: {feature}"
        )
    if kind == Kind.STRUCTURAL_TAG:
        parse_structural_tag(spec)
    text = serialize_guidance_grammar(kind, spec, options)
    if kind == Kind.STRUCTURAL_TAG:
        for part in parts_of(json.loads(spec)):
            try:
                _check_guidance(Kind.JSON, json.dumps(part.value), options)
            except ValueError as wrong:
                raise ValueError(f"{part.path}: {wrong}") from wrong
    if error := LLMatcher.validate_grammar(text, None):
        raise ValueError(f"Grammar error: {error}")
    if kind == Kind.JSON and not _can_begin(text):
        raise ValueError("Grammar error: no answer can be written")
    return kind, spec


@cache
def _byte_tokenizer() -> Any:
    """llguidance's tokenizer of a token a byte: what can be written with it, any other can."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _can_begin(grammar: str) -> bool:
    """Whether a grammar of llguidance has anything to begin an answer with but its end."""
    from llguidance import LLMatcher

    tokenizer = _byte_tokenizer()
    matcher = LLMatcher(tokenizer, grammar)
    if error := matcher.get_error():
        raise ValueError(f"Grammar error: {error}")
    first = int.from_bytes(matcher.compute_bitmask(), "little")
    return bool(first & ~(1 << tokenizer.eos_token))


def _check_outlines(kind: Kind, spec: str, options: JSONOptions) -> tuple[Kind, str]:
    from vllmx.structured_output.backend_outlines import check_pattern, pattern_of

    _refuse_compact(options)
    if kind in (Kind.GRAMMAR, Kind.STRUCTURAL_TAG):
        raise ValueError(
            "Outlines structured outputs backend does not support grammar specifications"
        )
    if kind == Kind.JSON:
        _check_schema(spec, OUTLINES)
    check_pattern(pattern_of(kind, spec, options))
    return kind, spec


def _check_enforcer(kind: Kind, spec: str, options: JSONOptions) -> tuple[Kind, str]:
    from vllmx.structured_output.backend_lm_format_enforcer import character_parser

    _refuse_compact(options)
    if options.whitespace_pattern is not None:
        raise ValueError("'whitespace_pattern' is not supported")
    if kind in (Kind.GRAMMAR, Kind.STRUCTURAL_TAG):
        raise ValueError(
            "LM Format Enforcer structured outputs backend does not support grammar specifications"
        )
    if kind == Kind.JSON:
        _check_schema(spec, ENFORCER)
    if not (spec if kind != Kind.JSON else texts_of(json.loads(spec))).isascii():
        raise ValueError("characters outside ASCII, which tokens may hold in part, are not taken")
    if kind == Kind.REGEX:
        compile_regex_with_timeout(_regex_parser, spec)
    else:
        character_parser(kind, spec, options)
    return kind, spec


def _regex_parser(pattern: str) -> Any:
    from vllmx.structured_output.backend_lm_format_enforcer import character_parser

    return character_parser(Kind.REGEX, pattern, JSONOptions())


_CHECKS: dict[str, Callable[[Kind, str, JSONOptions], tuple[Kind, str]]] = {
    "xgrammar": _check_xgrammar,
    "guidance": _check_guidance,
    "outlines": _check_outlines,
    "lm-format-enforcer": _check_enforcer,
}


def _refuse_compact(options: JSONOptions) -> None:
    if options.disable_any_whitespace:
        raise ValueError(
            "disable_any_whitespace is only supported for xgrammar and guidance backends."
        )


def _parse_schema(spec: str) -> Any:
    try:
        schema = json.loads(spec)
    except json.JSONDecodeError as error:
        raise ValueError(f"Invalid JSON grammar specification. {error}") from error
    _check_shape(schema)
    return schema


def _check_shape(schema: Any) -> None:
    if not isinstance(schema, (dict, bool)):
        text = json.dumps(schema, ensure_ascii=False)[:40]
        raise ValueError(f"a JSON schema is an object or a boolean, not {text!r}")
    if empty := "'false' (at #)" if schema is False else empty_list(schema):
        raise ValueError(f"no value is valid: {empty}")


def _check_schema(spec: str, support: SchemaSupport) -> None:
    feature = unsupported_feature(_parse_schema(spec), support)
    if feature is not None:
        raise ValueError(
            f"The provided JSON schema contains features not supported by {support.name}: {feature}"
        )
