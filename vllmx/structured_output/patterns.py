# SPDX-License-Identifier: Apache-2.0
"""What xgrammar reads in a regular expression as something else, without an error."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<escape>\\.) | (?P<set>\[\^?(?:\\.|[^\]\\])*\]) | (?P<open>\((?:\?(?:[:=!>]|<?[=!]|
    P?<\w+>))?) | (?P<close>\)) | (?P<repeat>[*+]|\{[\d,]*\}) | (?P<sign>[|^$?]) | (?P<char>.)""",
    re.VERBOSE | re.DOTALL,
)
_LETTERS = set("dDwWsSnrtfvaexuc")
"""Letters whose escapes it knows, or refuses when they lack what has to follow."""
_LETTERS_OUTSIDE = _LETTERS | set("bBkpP")
"""Outside a set it refuses these, and references to groups, by itself."""
_LETTERS_INSIDE = _LETTERS | {"b", "0"}


def misread_by_xgrammar(pattern: str) -> str | None:
    r"""The first part of `pattern` that xgrammar takes for something else; None if there is none.

    It leaves out anchors that are inside, where they allow nothing or less, and takes an escape
    that it does not know, like `\A` or `[\p{L}]`, for the letter.
    """
    tokens = [(str(match.lastgroup), match[0]) for match in _TOKEN.finditer(pattern)]
    for kind, text in tokens:
        escapes = re.findall(r"\\(.)", text, re.DOTALL) if kind in ("escape", "set") else ()
        known = _LETTERS_INSIDE if kind == "set" else _LETTERS_OUTSIDE
        for char in escapes:
            refused = kind == "escape" and char.isdigit()
            if char.isascii() and char.isalnum() and char not in known and not refused:
                return f"the escape '\\{char}'"
    ends = _matching(tokens)
    for place, (_, text) in enumerate(tokens):
        if text == "^" and not _at_start(tokens, place, ends):
            return "an anchor ('^') behind other characters"
        if text == "$" and not _at_end(tokens, place, ends):
            return "an anchor ('$') before other characters"
    return None


def _matching(tokens: list[tuple[str, str]]) -> dict[int, int]:
    """Places of brackets -> those of the brackets that close them, and the other way round."""
    found: dict[int, int] = {}
    waiting: list[int] = []
    for place, (kind, _) in enumerate(tokens):
        if kind == "open":
            waiting.append(place)
        elif kind == "close" and waiting:
            found[place] = waiting.pop()
            found[found[place]] = place
    return found


def _around(place: int, ends: dict[int, int]) -> int | None:
    """Where the innermost group around `place` opens."""
    return max((start for start, end in ends.items() if start < place < end), default=None)


def _at_start(tokens: list[tuple[str, str]], place: int, ends: dict[int, int]) -> bool:
    """Whether nothing can come before `place`, nor again before it."""
    while place > 0:
        kind, text = tokens[place - 1]
        if text == "^":
            place -= 1
            continue
        if kind != "open" and text != "|":
            return False
        opened = _around(place, ends)
        if opened is None:
            return text == "|"
        if _repeats(tokens, ends[opened]):
            return False
        place = opened
    return True


def _at_end(tokens: list[tuple[str, str]], place: int, ends: dict[int, int]) -> bool:
    """Whether nothing can follow `place`."""
    while place + 1 < len(tokens):
        kind, text = tokens[place + 1]
        if text in ("$", "?"):
            place += 1
            continue
        if kind != "close" and text != "|":
            return False
        opened = _around(place, ends)
        if opened is None:
            return text == "|"
        if _repeats(tokens, ends[opened]):
            return False
        place = ends[opened]
    return True


def _repeats(tokens: list[tuple[str, str]], end: int) -> bool:
    return end + 1 < len(tokens) and tokens[end + 1][0] == "repeat"
