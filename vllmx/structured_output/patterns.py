# SPDX-License-Identifier: Apache-2.0
"""What libraries read in a regular expression as something else, or find out too late."""

from __future__ import annotations

import re

_TOKEN = re.compile(
    r"""(?P<escape>\\.) | (?P<set>\[\^?(?:\\.|[^\]\\])*+\]) | (?P<unclosed>\[.*)
    | (?P<open>\((?:\?(?:[:=!>]|<?[=!]|P?<\w+>))?) | (?P<close>\)) | (?P<repeat>[*+]|\{[\d,]*\})
    | (?P<sign>[|^$?]) | (?P<char>.)""",
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
    tokens = _tokens(pattern)
    for kind, text in tokens:
        escapes = re.findall(r"\\(.)", text, re.DOTALL) if kind in ("escape", "set") else ()
        known = _LETTERS_INSIDE if kind == "set" else _LETTERS_OUTSIDE
        for char in escapes:
            refused = kind == "escape" and char.isdigit()
            if char.isascii() and char.isalnum() and char not in known and not refused:
                return f"the escape '\\{char}'"
    return _anchor_inside(tokens)


def anchor_inside(pattern: str) -> str | None:
    """Words for an anchor of `pattern` where text can come before its begin or after its end."""
    return _anchor_inside(_tokens(pattern))


def _tokens(pattern: str) -> list[tuple[str, str]]:
    return [(str(match.lastgroup), match[0]) for match in _TOKEN.finditer(pattern)]


def _anchor_inside(tokens: list[tuple[str, str]]) -> str | None:
    if _is_inside(tokens, "^", ("open", "close"), _repeated(tokens)):
        return "an anchor ('^') behind other characters"
    if _is_inside(tokens[::-1], "$", ("close", "open"), set()):
        return "an anchor ('$') before other characters"
    return None


def _repeated(tokens: list[tuple[str, str]]) -> set[int]:
    """Places where groups open that may come more than once."""
    found: set[int] = set()
    waiting: list[int] = []
    for place, (kind, _) in enumerate(tokens):
        if kind == "open":
            waiting.append(place)
        elif kind == "close" and waiting:
            opened = waiting.pop()
            if tokens[place + 1 : place + 2] and tokens[place + 1][0] == "repeat":
                found.add(opened)
    return found


def _is_inside(
    tokens: list[tuple[str, str]], anchor: str, brackets: tuple[str, str], repeated: set[int]
) -> bool:
    """Whether something can come before `anchor`; `tokens` may be those of the pattern backwards,
    where a repetition comes before what it repeats."""
    opens, closes = brackets
    # Of each group around: whether it begins where the pattern does, and whether its branch is
    # still empty.
    groups = [(True, True)]
    for place, (kind, text) in enumerate(tokens):
        begins, empty = groups[-1]
        if kind == opens:
            groups.append((begins and empty and place not in repeated, True))
        elif kind == closes:
            if len(groups) > 1:
                groups.pop()
            groups[-1] = (groups[-1][0], False)
        elif kind != "sign":
            groups[-1] = (begins, False)
        elif text == anchor and not (begins and empty):
            return True
        elif text == "|":
            groups[-1] = (begins, True)
        elif text not in (anchor, "?"):
            groups[-1] = (begins, False)
    return False
