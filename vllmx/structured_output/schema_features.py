# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_xgrammar.py @ v0.25.0
"""What a JSON schema asks for that a library would drop without a word.

A library is trusted with the forms of a schema that it is known to enforce, and with no other:
each sub-schema is a type with that type's keywords, a value, a reference, or a union.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllmx.structured_output.patterns import misread_by_xgrammar

Names = tuple[str, ...]
_SCHEMA: Names = ("additionalProperties", "additionalItems", "unevaluatedProperties")
_SCHEMA += ("unevaluatedItems", "items", "contains", "propertyNames", "not", "if", "then", "else")
_LISTS: Names = ("prefixItems", "anyOf", "oneOf", "allOf", "items")
_MAPS: Names = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAPS += ("dependencies",)
_COMBINE: Names = ("$ref", "anyOf", "oneOf", "allOf")
COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
"""Keywords whose value is a number of things."""

_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "array": {
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "minItems", "maxItems"),
        *("uniqueItems", "contains", "minContains", "maxContains"),
    },
    "object": {
        *("properties", "required", "additionalProperties", "unevaluatedProperties"),
        *("minProperties", "maxProperties", "patternProperties", "propertyNames"),
        *("dependentRequired", "dependentSchemas", "dependencies"),
    },
}
_OF_TYPE["integer"] = _OF_TYPE["number"]
_WHOLE: Names = ("$ref", "$dynamicRef", "$recursiveRef", "const", "enum", "anyOf", "oneOf")
_WHOLE += ("allOf", "not", "if", "then", "else", "extends", "disallow", "divisibleBy")
_WHOLE += ("$dynamicAnchor",)
_KNOWN = frozenset().union(*_OF_TYPE.values(), _WHOLE, ("type",))
"""Keywords that decide what is valid; all others are notes."""
_PLAIN = re.compile(
    r"""(?: [^\\"\[.\x00-\x1f] | \\[dw.*+?()\[\]{}|^$/-]
        | \[(?!\^) (?: [a-z]-[a-z] | [A-Z]-[A-Z] | [0-9]-[0-9] | -(?=\])
            | [^\\"\]\[\x00-\x1f-] | \\[dw.*+?()\[\]{}|^$/-] )+ \]
    )*""",
    re.VERBOSE,
)
"""Patterns whose matches hold no quote, backslash or control character."""
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class SchemaSupport:
    """Keywords that a library enforces."""

    name: str
    keywords: frozenset[str]
    """Those of types, and of `_WHOLE`."""
    formats: frozenset[str]
    """Of strings."""
    exclusive: tuple[tuple[str, ...], ...] = ()
    """Groups of keywords of which it enforces one at a time."""
    takes_any: bool = True
    """Whether it knows a schema that allows anything: true, {} or no `type`."""
    takes_free: bool = True
    """Whether it knows objects and arrays whose parts are not described."""
    plain_patterns: bool = False
    """Whether it writes what a pattern allows as it is, a quote or a control character too."""
    takes_values: bool = True
    """Whether it knows values of `const` and `enum` that are not all strings."""
    names_required: bool = True
    """Whether it enforces `required` of properties that are not described."""
    misread_pattern: Callable[[str], str | None] | None = None
    """Names what it takes for something else in a pattern; None where it refuses that itself."""


_FORMATS = """email date time date-time duration ipv4 ipv6 hostname uuid uri uri-reference
uri-template json-pointer relative-json-pointer"""
_NUMBERS = "minimum maximum exclusiveMinimum exclusiveMaximum"
XGRAMMAR = SchemaSupport(
    "xgrammar",
    frozenset(
        f"""$ref const enum anyOf pattern format {_NUMBERS} items prefixItems minItems maxItems
        properties required additionalProperties minProperties maxProperties""".split()
    ),
    frozenset(_FORMATS.split()),
    (("pattern", "format"),),
    names_required=False,
    misread_pattern=misread_by_xgrammar,
)
"""In strings of a `minLength` or `maxLength` it allows control characters, which JSON does not."""
OUTLINES = SchemaSupport(
    "outlines",
    frozenset(
        """$ref const enum anyOf minLength maxLength pattern format items minItems maxItems
        properties required""".split()
    ),
    frozenset("date-time date time uuid uri email".split()),
    (("pattern", "format", "minLength"), ("pattern", "format", "maxLength")),
    takes_any=False,
    takes_free=False,
    plain_patterns=True,
    names_required=False,
)
"""Anything is a pattern of 14,000 characters to it, which takes seconds to minutes to compile."""
ENFORCER = SchemaSupport(
    "lm-format-enforcer",
    frozenset(
        """$ref const enum anyOf maxLength pattern items minItems maxItems
        properties required additionalProperties""".split()
    ),
    frozenset(),
    (("pattern", "maxLength"),),
    takes_any=False,
    plain_patterns=True,
    takes_values=False,
    names_required=False,
)
"""A string that has its `minLength` may end without a quote."""


def unsupported_feature(schema: Any, support: SchemaSupport) -> str | None:
    """The first thing in `schema` that the library would not enforce, with its place."""
    for path, node in subschemas(schema):
        if isinstance(node, dict):
            found = _unsupported_here(node, path, support)
        else:
            found = None if support.takes_any else f"the schema {str(node).lower()}"
        if found is not None:
            return f"{found} (at {path})"
    return None


def misread_by_guidance(schema: Any) -> str | None:
    """What llguidance, which refuses by itself what it does not know, takes for something else."""
    own_ids = 0
    for path, node in subschemas(schema):
        if not isinstance(node, dict):
            continue
        own_ids += path != "#" and bool({"$id", "id"} & node.keys())
        if "additionalItems" in node and "prefixItems" in node:
            return f"'additionalItems' together with 'prefixItems' (at {path})"
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.get(name), bool):
                return f"'{name}' that is no number (at {path})"
        target = node.get("$ref")
        if own_ids and isinstance(target, str) and not target.startswith("#"):
            return f"'$ref' to {target!r} beside '$id' of a part (at {path})"
    return _misread_numbers(schema)


def _misread_numbers(schema: Any) -> str | None:
    """Bounds that llguidance misreads: a multiple below zero can't be written, and of two bounds
    less than one apart a whole exclusive one is let through."""
    nodes = [(path, node) for path, node in subschemas(schema) if isinstance(node, dict)]
    groups = [[pair] for pair in nodes]
    if any(name in node for _, node in nodes for name in _COMBINE):
        groups = [nodes]  # what one says counts for others
    for group in groups:
        found: dict[str, list[tuple[float, str]]] = {name: [] for name in _OF_TYPE["number"]}
        for path, node in group:
            for name in found.keys() & node.keys():
                if isinstance(node[name], (int, float)):
                    found[name].append((node[name], path))
        for name in ("maximum", "exclusiveMaximum"):
            for value, path in found[name]:
                if found["multipleOf"] and (value < 0 or (value == 0 and name != "maximum")):
                    return f"'multipleOf' together with '{name}' below zero (at {path})"
        lower, upper = ("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")
        for (exclusive, _), others in ((lower, upper), (upper, lower)):
            for value, path in found[exclusive]:
                near = [name for name in others for to, _ in found[name] if abs(to - value) < 1]
                if near and value == int(value):
                    return f"'{exclusive}' less than one from '{near[0]}' (at {path})"
    return None


def empty_list(schema: Any) -> str | None:
    """A list of choices that leaves none, with its place."""
    for path, node in subschemas(schema):
        for name in ("enum", "type", "anyOf", "oneOf", "allOf"):
            if isinstance(node, dict) and node.get(name) == []:
                return f"'{name}' is an empty list (at {path})"
    return None


def has_xgrammar_unsupported_json_features(schema: Any) -> bool:
    """Whether xgrammar would not enforce all of `schema`."""
    return unsupported_feature(schema, XGRAMMAR) is not None


def _unsupported_here(node: dict[str, Any], path: str, support: SchemaSupport) -> str | None:
    used = [name for name in node if name in _KNOWN]
    for name in used:
        if name not in support.keywords and name not in ("type", "allOf", "oneOf"):
            if name == "uniqueItems" and node[name] is False:
                continue
            return f"'{name}'"
    whole = [name for name in used if name in _WHOLE]
    if whole:
        return _unsupported_whole(node, whole, [n for n in used if n not in whole], path, support)
    types = node.get("type")
    if types is None:
        if not used:
            return None if support.takes_any else "a schema without 'type'"
        if "properties" not in node or not _OF_TYPE["object"].issuperset(used):
            return f"'{used[0]}' without 'type'"
        types = "object"
    if isinstance(types, list) and len(types) == 1:
        types = types[0]
    if not support.takes_free:
        for name, parts in (("object", "properties"), ("array", "items")):
            if parts not in node and (types == name or (isinstance(types, list) and name in types)):
                return f"type '{name}' without '{parts}'"
    if not isinstance(types, str):
        rest = [name for name in used if name != "type"]
        return f"'{rest[0]}' of several types" if rest else None
    own = _OF_TYPE.get(types, set())
    for name in used:
        if name != "type" and name not in own:
            return f"'{name}' of type '{types}'"
    for group in support.exclusive:
        together = [name for name in group if name in node]
        if len(together) > 1:
            return f"'{together[0]}' together with '{together[1]}'"
    for name in used:
        if name in COUNTS and type(node[name]) is not int:
            return f"'{name}' that is no whole number"
    if not support.names_required and types == "object":
        unnamed = set(node.get("required", ())) - set(node.get("properties", ()))
        if unnamed:
            return f"'required' of {sorted(unnamed)[0]!r}, which is not among 'properties'"
    if types == "string" and "format" in node and node["format"] not in support.formats:
        return f"format '{node['format']}'"
    if support.plain_patterns and "pattern" in node and not _PLAIN.fullmatch(str(node["pattern"])):
        return "'pattern' of more than letters, digits and signs that JSON writes as they are"
    if support.misread_pattern is not None and "pattern" in node:
        misread = support.misread_pattern(str(node["pattern"]))
        if misread is not None:
            return f"'pattern' with {misread}"
    if isinstance(node.get("items"), list):
        return "'items' as a list"
    return None


def _unsupported_whole(
    node: dict[str, Any], whole: list[str], others: list[str], path: str, support: SchemaSupport
) -> str | None:
    """The same for a reference, a value or a union."""
    name = whole[0]
    if len(whole) > 1:
        return f"'{name}' together with '{whole[1]}'"
    if name in ("const", "enum"):
        values = node["enum"] if name == "enum" else [node["const"]]
        if not support.takes_values and not all(isinstance(value, str) for value in values):
            return f"'{name}' with values that are no strings"
        if others == ["type"] and isinstance(values, list):
            if all(_is_of_type(value, node["type"]) for value in values):
                return None
            return f"'{name}' with values of another type"
    if others:
        return f"'{name}' together with '{others[0]}'"
    if name == "$ref":
        target = node["$ref"]
        if not isinstance(target, str) or not (target == "#" or target.startswith("#/")):
            return f"'$ref' to {target!r}"
    if name == "oneOf" or (name == "allOf" and len(node["allOf"]) > 1):
        return f"'{name}'"
    return "'$id' of a part" if "$id" in node and path != "#" else None


def _is_of_type(value: Any, types: Any) -> bool:
    names = types if isinstance(types, list) else [types]
    for name in names:
        expected = _PYTHON_TYPES.get(name, ())
        if isinstance(value, expected) and (name == "boolean" or not isinstance(value, bool)):
            return True
    return False


def texts_of(schema: Any) -> str:
    """All that answers have to spell as `schema` does: names, values and patterns."""
    found: list[Any] = []
    for _, node in subschemas(schema):
        if isinstance(node, dict):
            found += [node.get(name) for name in ("const", "enum", "pattern", "required")]
            found += [*node.get("properties", ())]
    return str(found)


def subschemas(schema: Any, path: str = "#") -> Iterator[tuple[str, dict[str, Any] | bool]]:
    """(JSON pointer, schema) of everything in `schema` that is a schema itself, outermost first."""
    waiting = [(path, schema)]
    while waiting:
        here, node = waiting.pop()
        if not isinstance(node, (dict, bool)):
            continue
        yield here, node
        if isinstance(node, bool):
            continue
        children: list[tuple[str, Any]] = []
        for name in _SCHEMA:
            if name != "additionalProperties" or not isinstance(node.get(name), bool):
                children.append((f"{here}/{name}", node.get(name)))
        for name in _LISTS:
            value = node.get(name)
            if isinstance(value, list):
                children += [(f"{here}/{name}/{i}", item) for i, item in enumerate(value)]
        for name in _MAPS:
            value = node.get(name)
            if isinstance(value, dict):
                children += [(f"{here}/{name}/{key}", item) for key, item in value.items()]
        waiting += reversed(children)


def close_objects(schema: Any) -> Any:
    """A copy of `schema` whose objects have the properties that they name, and no others, unless
    they speak of others."""
    closed = copy.deepcopy(schema)
    for _, node in subschemas(closed):
        if isinstance(node, dict) and ("properties" in node or "patternProperties" in node):
            node.setdefault("additionalProperties", False)
    return closed
