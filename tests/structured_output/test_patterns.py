# SPDX-License-Identifier: Apache-2.0
"""Patterns that xgrammar reads as something else are named, and no others."""

import itertools
import random
import re
import string
import time

import pytest
import xgrammar
from xgrammar.testing import _is_grammar_accept_string

from vllmx.structured_output.patterns import misread_by_xgrammar

TEXTS = ["".join(text) for n in range(4) for text in itertools.product("ab", repeat=n)]


@pytest.mark.parametrize(
    "pattern", ["a^b", "a$b", "(^a)+", "x(^a)", "(a$|b)c", "((a|b$)){2}", "(a$)*", "a|b^", "$a"]
)
def test_anchors_inside_are_named(pattern: str) -> None:
    assert "an anchor" in str(misread_by_xgrammar(pattern))


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "^a$|^b$",
            "(^a|b)",
            "(^a)?b",
            "(a$)",
            "((a|b$))",
            r"\$5\^",
            "[$^]a",
            "a|^b",
            "(?:^a$)|c",
        ),
        *("^", "$", "^$", "(a|(^b))c", r"[\]^]a", "(x|^)a", "a($|b)", "(a$)?", "(?<n>^a)", ""),
    ],
)
def test_anchors_at_the_ends_and_signs_that_are_none_are_taken(pattern: str) -> None:
    assert misread_by_xgrammar(pattern) is None


@pytest.mark.parametrize("form", ["\\{}", "[\\{}]"])
def test_an_escape_is_named_exactly_where_the_library_takes_it_for_its_letter(form: str) -> None:
    signs = string.ascii_letters + string.digits
    named = 0
    for char in signs:
        try:
            grammar = xgrammar.Grammar.from_regex(form.format(char))
        except RuntimeError:
            continue
        taken = [other for other in signs if _is_grammar_accept_string(grammar, other)]
        misread = misread_by_xgrammar(form.format(char))
        assert (misread is not None) == (taken == [char]), form.format(char)
        assert misread is None or f"'\\{char}'" in misread
        named += misread is not None
    assert named > 20


@pytest.mark.parametrize("seed", range(4))
def test_a_pattern_that_is_not_named_means_what_it_means_elsewhere(seed: int) -> None:
    rng = random.Random(seed)
    taken = 0
    while taken < 60:
        pattern = "".join(rng.choices("ab^$(|)?*+", (4, 4, 2, 2, 2, 2, 2, 1, 1, 1), k=7))
        try:
            meant = re.compile(pattern)
            grammar = xgrammar.Grammar.from_regex(pattern)
        except (re.error, RuntimeError):
            continue
        if misread_by_xgrammar(pattern) is not None:
            continue
        taken += 1
        for text in TEXTS:
            assert _is_grammar_accept_string(grammar, text) == bool(meant.fullmatch(text)), (
                pattern,
                text,
            )


@pytest.mark.parametrize("part", ["(^", "^", "$)", "[", "(", "(^a)+|", "(?:", "a$|", "\\", "[^"])
def test_long_patterns_take_no_time(part: str) -> None:
    started = time.perf_counter()
    misread_by_xgrammar(part * 20_000)
    misread_by_xgrammar("(" * 10_000 + part + ")" * 10_000)
    assert time.perf_counter() - started < 2
