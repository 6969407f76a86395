# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_xgrammar.py @ v0.25.0
"""The schemas, patterns and grammars that stand in a structural tag, at whatever place.

A structural tag is a `format`, which holds formats within formats, or in its older form a list of
`structures` with `triggers`. What stands in it is held to the same rules as if it stood alone.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

from vllmx.structured_output.backend_types import StructuredOutputOptions
from vllmx.structured_output.patterns import misread_by_xgrammar
from vllmx.structured_output.schema_features import (
    XGRAMMAR,
    SchemaSupport,
    subschemas,
    unsupported_feature,
)

_HOLD = {
    "json_schema": StructuredOutputOptions.JSON,
    "schema": StructuredOutputOptions.JSON,
    "pattern": StructuredOutputOptions.REGEX,
    "grammar": StructuredOutputOptions.GRAMMAR,
}
"""Fields of formats -> the kind of constraint in them; `schema` is that of the older form."""
_DROPPED_BESIDE = {"any_order": ("required", "minProperties"), "excludes": ("pattern", "format")}
"""Settings of formats of JSON -> keywords that xgrammar drops beside them."""
_LARK_PATTERN = re.compile(r'"(?:\\.|[^"\\\n])*"|//.*|#.*|/(?P<pattern>(?:\\.|[^/\\\n])+)/')


@dataclass(frozen=True)
class Part:
    """A constraint in a structural tag."""

    path: str
    """JSON pointer to it."""
    kind: StructuredOutputOptions
    node: dict[str, Any]
    """The format that holds it, and what else it says."""
    name: str
    """Its field there."""

    @property
    def value(self) -> Any:
        """The schema, the pattern or the grammar."""
        return self.node[self.name]


def parse_structural_tag(text: str) -> dict[str, Any]:
    """A structural tag in the form of a `format`. ValueError if it is none, or has both forms."""
    tag = json.loads(text)
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is a JSON object")
    if "structures" not in tag:
        return tag
    if tag.get("format") is not None:
        raise ValueError("a structural tag has a 'format' or 'structures', not both")
    tags = []
    for item in tag["structures"]:
        if not (isinstance(item, dict) and {"begin", "schema", "end"} <= item.keys()):
            raise ValueError("each of 'structures' needs 'begin', 'schema' and 'end'")
        content = {"type": "json_schema", "json_schema": item["schema"]}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    return {"type": "structural_tag", "format": form}


def parts_of(tag: dict[str, Any]) -> Iterator[Part]:
    """The constraints that stand in a structural tag of either form."""
    for path, node in _formats(tag):
        for name, kind in _HOLD.items():
            if name in node:
                yield Part(f"{path}/{name}", kind, node, name)


def _formats(tag: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(JSON pointer, format) of all formats of a structural tag, or its `structures`; schemas have
    none within."""
    form = "structures" if "structures" in tag else "format"
    waiting = [(f"#/{form}", tag.get(form))]
    while waiting:
        path, node = waiting.pop()
        children: list[tuple[Any, Any]] = []
        if isinstance(node, dict):
            yield path, node
            children = [(name, child) for name, child in node.items() if name not in _HOLD]
        elif isinstance(node, list):
            children = list(enumerate(node))
        waiting += reversed([(f"{path}/{name}", child) for name, child in children])


def with_schemas(tag: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a structural tag whose schemas are changed; ValueError if it is none."""
    if not isinstance(tag, dict):
        raise ValueError("a structural tag is a JSON object")
    made = copy.deepcopy(tag)
    for part in list(parts_of(made)):
        if part.kind == StructuredOutputOptions.JSON:
            part.node[part.name] = change(part.value)
    return made


def refused_by_xgrammar(part: Part) -> str | None:
    """What xgrammar would not enforce of a part of a structural tag; None if it enforces it all.
    What it refuses by itself is not looked at."""
    kind, node = part.kind, part.node
    if kind == StructuredOutputOptions.JSON:
        return _unkept_setting(part) or unsupported_feature(part.value, _support_of(node))
    if not isinstance(part.value, str):
        return None
    if kind == StructuredOutputOptions.REGEX:
        return misread_by_xgrammar(part.value)
    if node.get("syntax") == "lark":
        for match in _LARK_PATTERN.finditer(part.value):
            if match["pattern"] and (misread := misread_by_xgrammar(match["pattern"])):
                return f"a pattern with {misread}"
    return None


def _support_of(node: dict[str, Any]) -> SchemaSupport:
    if node.get("style") == "minimax_m3_xml":
        return replace(XGRAMMAR, keywords=XGRAMMAR.keywords - {"maxProperties"})
    return XGRAMMAR


def _unkept_setting(part: Part) -> str | None:
    """A setting of a format of JSON beside which xgrammar drops a keyword of the schema."""
    for setting, keywords in _DROPPED_BESIDE.items():
        if not part.node.get(setting):
            continue
        for path, schema in subschemas(part.value):
            for keyword in keywords:
                if isinstance(schema, dict) and schema.get(keyword):
                    return f"'{keyword}' together with '{setting}' (at {path})"
    return None


def with_token_ids(text: str, tokenizer: Any) -> str:
    """A structural tag whose tokens are all ids; tokens may be given by their text as well.
    ValueError for a text that is no token of `tokenizer`."""
    try:
        tag = json.loads(text)
    except (ValueError, RecursionError):
        return text  # the libraries say what is wrong with it
    if not isinstance(tag, dict):
        return text
    changed = False
    for path, node in _formats(tag):
        for holder, key in _tokens_of(node):
            if isinstance(holder[key], str):
                holder[key], changed = _token_id(holder[key], tokenizer, path), True
    return json.dumps(tag, ensure_ascii=False) if changed else text


def _tokens_of(node: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Where a format names tokens: (object or list, key or place)."""
    if "token" in node:
        yield node, "token"
    for name in ("exclude_tokens", "trigger_tokens"):
        named = node.get(name)
        if isinstance(named, list):
            yield from ((named, i) for i in range(len(named)))
    rules = node.get("rules")
    if node.get("type") == "token_dispatch" and isinstance(rules, list):
        yield from ((rule, 0) for rule in rules if isinstance(rule, list) and rule)


def _token_id(text: str, tokenizer: Any, path: str) -> int:
    found = tokenizer.convert_tokens_to_ids(text)
    if found is not None:
        return int(found)
    spelled = tokenizer.encode(text, add_special_tokens=False)
    if len(spelled) != 1:
        raise ValueError(
            f"Invalid structural tag specification. {text!r} (at {path}) is no token of this "
            "model; name one, or give its id."
        )
    return int(spelled[0])


def unknown_field(tag: dict[str, Any]) -> str | None:
    """A field that no format of its type has, which xgrammar would drop, with its place."""
    for path, node in _formats(tag):
        named = node.get("type")
        fitting = [_fields()[named]] if named in _fields() else [*_fields().values()]
        extra = min((node.keys() - fields for fields in fitting), key=len)
        if extra:
            return f"the field '{min(extra)}' (at {path})"
    return None


@cache
def _fields() -> dict[str, frozenset[str]]:
    """Types of formats that xgrammar knows -> their fields."""
    from xgrammar.structural_tag import Format

    models = get_args(get_args(Format)[0])
    return {model.model_fields["type"].default: frozenset(model.model_fields) for model in models}
