# SPDX-License-Identifier: Apache-2.0
"""JSON schemas said in words that the libraries know.

No library knows every keyword, but many say what others say too: `unevaluatedProperties` without
anything that evaluates is `additionalProperties`, a dependency is a union. A schema that no library
enforces as it is written is rewritten into one of the same meaning, and asked for again. What has
no other words stays, and is refused by its name.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from vllmx.structured_output.schema_features import COUNTS, subschemas

Node = dict[str, Any]
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_CHOOSE = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas", "dependencies")
"""What evaluates parts of a value or does not, by the value."""
_TYPES = ("null", "boolean", "object", "array", "string", "number")
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-06", "draft-07")

LONGEST_AS_PATTERN = 256
"""Characters that a pattern counts; compiling it takes xgrammar the square of them in time."""


def rewrite_schema(schema: Any) -> Any:
    """A copy of `schema` of the same meaning with fewer keywords; equal to it if there is nothing
    to say otherwise."""
    made = copy.deepcopy(schema)
    if not isinstance(made, dict) or not _point_references(made):
        return schema
    old = any(draft in str(made.get("$schema")) for draft in _OLD_DRAFTS)
    if old:
        for _, node in subschemas(made):
            _lone_reference(node)
    text = json.dumps(made)
    rules: list[Callable[[Node], None]] = [_items_as_list, _trifles]
    if "unevaluated" not in text:
        # Beside those it matters what a keyword counts as evaluated, not only what it allows.
        rules += [_property_names, _condition, _dependencies]
        rules += [] if old else [_contains]
    nodes = [node for _, node in subschemas(made) if isinstance(node, dict)]
    if "unevaluated" not in text:
        for node in nodes:
            _not(node)
    for node in reversed(nodes):  # inner ones first
        for rule in rules:
            rule(node)
    for node in nodes:
        _unevaluated(node, made)
    lost = any(
        _target(node["$ref"], made) is None
        for _, node in subschemas(made)
        if isinstance(node, dict) and "$ref" in node
    )
    if lost:
        return schema
    # The new words are those of the newest draft, which is what libraries take where none is named.
    named = made.pop("$schema", None)
    same = named is not None and json.dumps({"$schema": named, **made}) == json.dumps(
        {"$schema": named, **schema}
    )
    return schema if same else made


def lengths_as_patterns(schema: Any) -> Any:
    """A copy of `schema` whose strings of a certain length have a pattern that says so; such a
    string has no characters that JSON escapes."""
    made = copy.deepcopy(schema)
    for _, node in subschemas(made):
        if not isinstance(node, dict) or node.get("type") not in ("string", ["string"]):
            continue
        bounds = [node[name] for name in ("minLength", "maxLength") if name in node]
        others = {"pattern", "format", "const", "enum", "anyOf", "oneOf", "allOf", "$ref"}
        if not bounds or others & node.keys():
            continue
        if all(type(bound) is int and 0 <= bound <= LONGEST_AS_PATTERN for bound in bounds):
            least, most = node.pop("minLength", 0), node.pop("maxLength", "")
            node["pattern"] = f"^[\\s\\S]{{{least},{most}}}$"
    return made


def _lone_reference(node: Any) -> None:
    """In older drafts nothing counts beside a reference."""
    if isinstance(node, dict) and "$ref" in node:
        for name in node.keys() - {"$ref", "$defs", "definitions", "$schema"}:
            del node[name]


def _also(node: Node, *schemas: Any) -> None:
    """Demand `schemas` too."""
    if schemas:
        node["allOf"] = [*node.get("allOf", ()), *schemas]


def _items_as_list(node: Node) -> None:
    """Older drafts' `items` with a list is `prefixItems`, and `additionalItems` the rest."""
    rest = node.pop("additionalItems", None)
    if isinstance(node.get("items"), list) and "prefixItems" not in node:
        node["prefixItems"] = node.pop("items")
        if rest is not None:
            node["items"] = rest
        if not node["prefixItems"]:
            del node["prefixItems"]


def _trifles(node: Node) -> None:
    """Keywords that allow everything, and counts that look like fractions."""
    for name in COUNTS:
        value = node.get(name)
        if isinstance(value, float) and value.is_integer():
            node[name] = int(value)
    if node.get("uniqueItems") is False or node.get("maxItems") in (0, 1):
        node.pop("uniqueItems", None)
    if node.get("propertyNames") in (True, {}):
        del node["propertyNames"]
    if "contains" not in node:
        node.pop("minContains", None)
        node.pop("maxContains", None)
    if "if" not in node:
        node.pop("then", None)
        node.pop("else", None)
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if node.get(name) == {}:
            del node[name]


def _not(node: Node) -> None:
    denied = node.get("not")
    if denied is False:
        del node["not"]
    elif isinstance(denied, dict) and len(denied) == 1:
        ((name, value),) = denied.items()
        if name == "not":
            _also(node, value)
        elif name == "required" and isinstance(value, list) and len(value) == 1:
            _also(node, {"type": "object", "properties": {value[0]: False}})
        elif name == "type" and "integer" not in (names := _as_list(value)):
            left = [name for name in _TYPES if name not in names]
            _also(node, {"type": left} if left else False)
        else:
            return
        del node["not"]


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _property_names(node: Node) -> None:
    """A rule of names as properties of such names and no others."""
    names = node.get("propertyNames")
    if names is False:
        rule: Node = {"additionalProperties": False}
    elif not isinstance(names, dict):
        return
    elif names.keys() == {"pattern"}:
        rule = {"patternProperties": {names["pattern"]: True}, "additionalProperties": False}
    elif names.keys() == {"maxLength"} and type(names["maxLength"]) is int:
        pattern = f"^[\\s\\S]{{0,{names['maxLength']}}}$"
        rule = {"patternProperties": {pattern: True}, "additionalProperties": False}
    elif names.keys() <= {"enum", "const"} and len(names) == 1:
        (values,) = names.values()
        allowed = values if "enum" in names else [values]
        properties = {name: True for name in allowed if isinstance(name, str)}
        rule = {"properties": properties, "additionalProperties": False}
    else:
        return
    del node["propertyNames"]
    _also(node, rule)


def _condition(node: Node) -> None:
    condition = node.get("if")
    if "if" in node and "then" not in node and "else" not in node:
        del node["if"]
    elif isinstance(condition, bool):
        del node["if"]
        then, otherwise = node.pop("then", True), node.pop("else", True)
        _also(node, then if condition else otherwise)


def _dependencies(node: Node) -> None:
    """If a property is there, others have to be, or a schema has to hold: or it is not there."""
    given = [node.pop(name, {}) for name in ("dependentRequired", "dependentSchemas")]
    given.append(node.pop("dependencies", {}))
    for name, wanted in ((name, wanted) for group in given for name, wanted in group.items()):
        if wanted in ([], {}, True):
            continue
        if isinstance(wanted, (list, str)):
            there: Node = {"required": [name, *_as_list(wanted)]}
        elif wanted is False:
            _also(node, {"properties": {name: False}})
            continue
        else:
            there = {"allOf": [{"required": [name]}, wanted]}
        _also(node, {"anyOf": [{"properties": {name: False}}, there]})


def _contains(node: Node) -> None:
    """Items that anything may be count like items."""
    if "contains" not in node:
        return
    least, most = node.get("minContains", 1), node.get("maxContains")
    if least == 0 and most is None:
        del node["contains"], node["minContains"]
    elif node["contains"] in (True, {}):
        for name in ("contains", "minContains", "maxContains"):
            node.pop(name, None)
        node["minItems"] = max(least, node.get("minItems", 0))
        if most is not None:
            node["maxItems"] = min(most, node.get("maxItems", most))


# ---- what is left over ----


def _unevaluated(node: Node, root: Node) -> None:
    """`unevaluatedProperties` and `unevaluatedItems` as what is left of what surely is."""
    if "unevaluatedProperties" in node and (parts := _in_place(node, root)) is not None:
        _rest_of_properties(node, parts)
    if "unevaluatedItems" in node and (parts := _in_place(node, root)) is not None:
        _rest_of_items(node, parts)


def _in_place(node: Node, root: Node, depth: int = 8) -> list[Node] | None:
    """`node` and all schemas that hold of its value for certain; None if others may hold."""
    if depth == 0 or any(name in node for name in (*_CHOOSE, "$dynamicRef", "$recursiveRef")):
        return None
    found, inner = [node], list(node.get("allOf", ()))
    if "$ref" in node:
        inner.append(_target(node["$ref"], root))
    for schema in inner:
        if isinstance(schema, bool):
            continue
        parts = _in_place(schema, root, depth - 1) if isinstance(schema, dict) else None
        if parts is None:
            return None
        found += parts
    return found


def _rest_of_properties(node: Node, parts: list[Node]) -> None:
    rest = node.pop("unevaluatedProperties")
    if any("additionalProperties" in part for part in parts):
        return  # nothing is left over
    if any("unevaluatedProperties" in part for part in parts):
        node["unevaluatedProperties"] = rest
        return
    for name in ("properties", "patternProperties"):
        known = {key: True for part in parts for key in part.get(name, ())}
        if known:
            node[name] = {**known, **node.get(name, {})}
    node["additionalProperties"] = rest


def _rest_of_items(node: Node, parts: list[Node]) -> None:
    if any("contains" in part for part in parts):
        return  # what it finds is evaluated
    rest = node.pop("unevaluatedItems")
    if any("items" in part for part in parts):
        return
    if any("unevaluatedItems" in part for part in parts):
        node["unevaluatedItems"] = rest
        return
    own = node.get("prefixItems", [])
    longest = max(len(part.get("prefixItems", ())) for part in parts)
    if longest:
        node["prefixItems"] = [*own, *[True] * (longest - len(own))]
    node["items"] = rest


# ---- references ----


def _point_references(root: Node) -> bool:
    """Make references by name or address pointers into `root`, and drop the names; False if one
    leads out of it, or to different places by the way to it."""
    places: dict[str, str] = {}
    references: list[tuple[Node, str, str]] = []
    dynamic: list[str] = []
    bases = {"#": str(root.get("$id", root.get("id", "")))}
    for path, node in subschemas(root):
        base = _base_of(path, bases)
        if not isinstance(node, dict):
            continue
        own = node.get("$id")
        if isinstance(own, str) and path != "#":
            if "$ref" in node:
                return False  # older drafts do not see this $id
            base = urljoin(base, own)
        bases[path] = base
        address, fragment = urldefrag(base)
        places.setdefault(f"{address}#{fragment}", path)
        for name in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(name), str):
                places[f"{address}#{node[name]}"] = path
        dynamic += [node["$dynamicAnchor"]] if "$dynamicAnchor" in node else []
        references += [(node, name, base) for name in _REFERENCES if name in node]
    if "$recursiveAnchor" in json.dumps(root) or len(dynamic) != len(set(dynamic)):
        return False
    pointers = [_pointer(node[name], base, places, root) for node, name, base in references]
    if None in pointers:
        return False
    for (node, name, _), pointer in zip(references, pointers, strict=True):
        del node[name]
        if "$ref" in node:
            _also(node, {"$ref": pointer})
        else:
            node["$ref"] = pointer
    for path, node in subschemas(root):
        if isinstance(node, dict):
            for name in ("$id", "$anchor", "$dynamicAnchor")[0 if path != "#" else 1 :]:
                node.pop(name, None)
    return True


def _base_of(path: str, bases: dict[str, str]) -> str:
    """The address that references at `path` are relative to: that of the schema around it."""
    while path not in bases:
        path = path.rpartition("/")[0]
    return bases[path]


def _pointer(reference: Any, base: str, places: dict[str, str], root: Node) -> str | None:
    """Where `reference` leads to, as a pointer; None if it leads out of `root`, or nowhere."""
    if not isinstance(reference, str):
        return None
    address, fragment = urldefrag(urljoin(base, reference))
    if not fragment or fragment.startswith("/"):
        start = places.get(f"{address}#")
        pointer = None if start is None else start + fragment
    else:
        pointer = places.get(f"{address}#{fragment}")
    return pointer if pointer is not None and _target(pointer, root) is not None else None


def _target(pointer: Any, root: Node) -> Any:
    """What a pointer leads to; None if there is nothing."""
    if not isinstance(pointer, str) or not pointer.startswith("#"):
        return None
    found: Any = root
    for part in _parts(pointer):
        if isinstance(found, list) and part.isdigit() and int(part) < len(found):
            found = found[int(part)]
        elif isinstance(found, dict) and part in found:
            found = found[part]
        else:
            return None
    return found


def _parts(pointer: str) -> Iterable[str]:
    if pointer == "#":
        return ()
    return (unquote(p).replace("~1", "/").replace("~0", "~") for p in pointer[2:].split("/"))
