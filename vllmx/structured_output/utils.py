# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/utils.py @ v0.25.0
"""Texts of grammars: choices and Lark as EBNF, and a limit to the time that a pattern takes."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TypeVar

from vllmx.structured_output.compilation import Attempts, GaveUp, NoPlace

Compiled = TypeVar("Compiled")

VLLM_REGEX_COMPILATION_TIMEOUT_S = 5.0
"""Seconds that a regular expression may take to compile; 0 and less is no limit."""

_LARK_TOKEN = re.compile(
    r"""(?P<space>[ \t]+)|(?P<comment>(?:\#|//).*)|(?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
    |(?P<quote>["'])|(?P<name>[A-Za-z_]\w*)|(?P<class>\[(?:\\.|[^\]\\])*\])
    |(?P<range>\{[\d, ]+\}|~[ ]*\d+(?:\.\.\d+)?)|(?P<sign>[|()*+?:])""",
    re.VERBOSE,
)


_patterns = Attempts(max(4, os.cpu_count() or 1))


def compile_regex_with_timeout(fn: Callable[[str], Compiled], pattern: str) -> Compiled:
    """`fn(pattern)`, given up after VLLM_REGEX_COMPILATION_TIMEOUT_S with a ValueError.

    A pattern with nested quantifiers may take a library for ever. The thread that has begun can't
    be stopped; it is left to itself, and keeps no process from ending. As long as it goes on, the
    same pattern is refused to the same `fn` at once.
    """
    timeout = VLLM_REGEX_COMPILATION_TIMEOUT_S
    if timeout <= 0:
        return fn(pattern)
    try:
        return _patterns.run((fn, pattern), lambda: fn(pattern), timeout, wait_for_place=timeout)
    except GaveUp:
        raise ValueError(
            f"Regex compilation timed out after {timeout:g}s: the pattern is too complex (nested "
            f"quantifiers?). Pattern: {pattern[:200]}"
        ) from None
    except NoPlace:
        raise ValueError(
            f"{_patterns.num_places} patterns are being compiled for more than {timeout:g}s, and "
            f"no other is begun beside them. Send it again later. Pattern: {pattern[:200]}"
        ) from None


def grammar_is_likely_lark(grammar_str: str) -> bool:
    """Whether no line of a grammar defines a rule as EBNF does, by `::=`."""
    if not isinstance(grammar_str, str) or not grammar_str:
        return False
    lines = (re.sub(r"(#|//).*", "", line) for line in grammar_str.split("\n"))
    return not any("::=" in line for line in lines)


def choice_as_grammar(choice: list[str]) -> str:
    """EBNF of exactly the texts in `choice`."""
    return "root ::= " + " | ".join(map(_ebnf_string, choice))


def _ebnf_string(text: str) -> str:
    written = []
    for char in text:
        if char in '"\\':
            written.append("\\" + char)
        elif char < " " or char == "\x7f":
            # Not \x, which takes in the digits that follow.
            written.append(f"\\u{ord(char):04x}")
        else:
            written.append(char)
    return f'"{"".join(written)}"'


def convert_lark_to_ebnf(grammar_str: str) -> str:
    """The same grammar in EBNF, its begin called `root`: rule `start`, or the first one.

    Rules of names, strings, groups, alternatives and repetitions can be converted. ValueError,
    with the line, for what has no counterpart (patterns, directives, aliases) or is wrong.
    """
    match grammar_str:
        case str(text) if text.strip():
            lines = text.split("\n")
        case str():
            raise ValueError("Grammar string cannot be empty")
        case other:
            raise ValueError(f"Grammar must be a string, got {type(other)}")
    rules: dict[str, list[str]] = {}
    used: dict[str, None] = {}
    current: list[str] | None = None
    for number, line in enumerate(lines, 1):
        tokens = _lark_tokens(line, number)
        if not tokens:
            continue
        head = _rule_head(tokens)
        if head is not None:
            name, body = head
            current = rules.setdefault(name, [])
            if current:
                current.append("|")
        elif current is None:
            if tokens[0] == "|":
                raise ValueError(
                    f"Error on line {number}: Alternative '|' on line {number} "
                    "without a preceding rule definition"
                )
            raise ValueError("No valid rules found in grammar")
        else:
            body = tokens
        used.update(dict.fromkeys(token for token in body if token.isidentifier()))
        current.extend(body)
    if not rules:
        raise ValueError("No valid rules found in grammar")
    undefined = sorted(set(used) - set(rules) - {"root"})
    if undefined:
        raise ValueError(f"Referenced rules are not defined: {', '.join(undefined)}")
    first = "start" if "start" in rules else next(iter(rules))
    lines = [f"{name} ::= {' '.join(body)}" for name, body in rules.items()]
    return "\n".join(lines if first == "root" else [f"root ::= {first}", *lines])


def _rule_head(tokens: list[str]) -> tuple[str, list[str]] | None:
    """Name and body of the rule that a line begins; None if it goes on with the last one."""
    start = 1 if tokens[0] in ("?", "!") else 0
    if tokens[start + 1 : start + 2] != [":"]:
        return None
    return tokens[start], tokens[start + 2 :]


def _lark_tokens(line: str, number: int) -> list[str]:
    found: list[str] = []
    position = 0
    while position < len(line):
        match = _LARK_TOKEN.match(line, position)
        if match is None:
            raise ValueError(
                f"Error on line {number}: {line[position:].strip()[:40]!r} cannot be written in "
                "EBNF"
            )
        position = match.end()
        kind, text = match.lastgroup, match[0]
        if kind == "quote":
            rule = found[0] if found else ""
            raise ValueError(
                f"Error on line {number}: Mismatched quotes in rule '{rule}' on line {number}"
            )
        if kind == "string":
            if text[0] == "'":
                text = '"' + text[1:-1].replace("\\'", "'").replace('"', '\\"') + '"'
        elif kind == "range" and text.startswith("~"):
            low, _, high = text[1:].strip().partition("..")
            text = f"{{{low}, {high}}}" if high else f"{{{low}}}"
        if kind not in ("space", "comment"):
            found.append(text)
    return found
