# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_outlines.py @ v0.25.0
"""Grammars of the library outlines-core: everything becomes one regular expression."""

from __future__ import annotations

import json
import re
import re._constants as re_constants  # type: ignore[import-untyped]
import re._parser as re_parser  # type: ignore[import-untyped]
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

from vllmx.structured_output.backend_types import (
    JSONOptions,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllmx.structured_output.patterns import anchor_inside
from vllmx.structured_output.utils import compile_regex_with_timeout
from vllmx.structured_output.vocabulary import end_token_ids, token_bytes

if TYPE_CHECKING:
    import numpy as np

CACHED_INDEXES = 128
"""Compiled patterns that are kept."""


@dataclass
class OutlinesBackend(StructuredOutputBackend):
    """Compiles with outlines-core."""

    def __post_init__(self) -> None:
        self._indexes: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def end_token_id(self) -> int:
        """The token that ends an answer; ValueError where the model has none."""
        ends = end_token_ids(self.vllm_config.model_config, self.tokenizer, self.vocab_size)
        if not ends:
            raise ValueError("the outlines backend needs a tokenizer with an end token")
        return ends[0]

    @cached_property
    def vocabulary(self) -> Any:
        """Tokens by their bytes."""
        import outlines_core

        ids: dict[bytes, list[int]] = {}
        for token_id, data in enumerate(token_bytes(self.tokenizer, self.vocab_size)):
            if data and token_id != self.end_token_id:
                ids.setdefault(data, []).append(token_id)
        return outlines_core.Vocabulary(self.end_token_id, ids)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        options: JSONOptions | None = None,
    ) -> OutlinesGrammar:
        """See StructuredOutputBackend."""
        import outlines_core

        pattern = pattern_of(request_type, grammar_spec, self.json_options(options))
        with self._lock:
            index = self._indexes.get(pattern)
        if index is None:
            index = compile_regex_with_timeout(self._make_index, pattern)
            with self._lock:
                self._indexes[pattern] = index
                if len(self._indexes) > CACHED_INDEXES:
                    self._indexes.popitem(last=False)
        guide = outlines_core.Guide(index, max_rollback=self.num_speculative_tokens)
        return OutlinesGrammar(guide, self.end_token_id)

    def _make_index(self, pattern: str) -> Any:
        import outlines_core

        return outlines_core.Index(pattern, self.vocabulary)

    def destroy(self) -> None:
        """Drop what was compiled."""
        self._indexes.clear()


@dataclass
class OutlinesGrammar(StructuredOutputGrammar):
    """A guide of outlines-core. It does not take in the end token, which is kept here."""

    guide: Any
    end_token_id: int
    terminated: bool = field(default=False, init=False)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar."""
        for token in tokens:
            if self.terminated:
                return False
            if token == self.end_token_id:
                if not self.guide.is_finished():
                    return False
                self.terminated = True
            elif self.guide.accepts_tokens([token]):
                self.guide.advance(token, return_tokens=False)
            else:
                return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        if self.terminated:
            return []
        count = 0
        while count < len(tokens) and tokens[count] != self.end_token_id:
            if not self.guide.accepts_tokens(tokens[: count + 1]):
                return tokens[:count]
            count += 1
        if count == 0 and tokens and self.guide.is_finished():
            return tokens[:1]
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        """See StructuredOutputGrammar."""
        if num_tokens > 0:
            self.guide.rollback_state(num_tokens - self.terminated)
            self.terminated = False

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """See StructuredOutputGrammar."""
        row = bitmask[batch_index]
        self.guide.write_mask_into(row.ctypes.data, row.size, row.itemsize)

    def is_terminated(self) -> bool:
        """See StructuredOutputGrammar."""
        return self.terminated

    def reset(self) -> None:
        """See StructuredOutputGrammar."""
        self.guide.reset()
        self.terminated = False


def pattern_of(
    request_type: StructuredOutputOptions, grammar_spec: str, options: JSONOptions
) -> str:
    """The constraint as a regular expression; ValueError for a kind that can't be one."""
    from outlines_core import json_schema

    kind = StructuredOutputOptions
    if request_type == kind.JSON:
        return json_schema.build_regex_from_schema(grammar_spec, options.whitespace_pattern)
    if request_type == kind.REGEX:
        return grammar_spec
    if request_type == kind.CHOICE:
        return one_of(set(json.loads(grammar_spec)))
    raise ValueError(f"Invalid request type for Outlines backend ({request_type!s})")


def one_of(texts: set[str]) -> str:
    """A pattern of exactly `texts`, its branches told apart by their first characters: the library
    never gets past a branch that has matched."""
    by_first: dict[str, set[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], set()).add(text[1:])
    branches = []
    for first, rests in sorted(by_first.items()):
        whole = escape(first + next(iter(rests))) if len(rests) == 1 else None
        branches.append(whole or escape(first) + one_of(rests))
    pattern = "(" + "|".join(branches) + ")"
    return pattern + "?" if "" in texts else pattern


def escape(text: str) -> str:
    """`text` as a pattern that matches it alone."""
    return re.sub(r"[\\.+*?()|\[\]{}^$#&~/-]", r"\\\g<0>", text)


def check_pattern(pattern: str) -> None:
    """ValueError for a pattern that the library's automata can't have: references to groups,
    look-around, word boundaries, and an anchor before the first character or inside."""
    try:
        parsed = re_parser.parse(pattern)
    except re.error as error:
        raise ValueError(f"Error parsing regex: {error}") from error
    for kind, value in _nodes(parsed):
        if kind in (re_constants.GROUPREF, re_constants.GROUPREF_EXISTS):
            unsupported = "Backreferences"
        elif kind in (re_constants.ASSERT, re_constants.ASSERT_NOT):
            unsupported = "Look-Around assertion"
        elif kind == re_constants.AT and value in (
            re_constants.AT_BOUNDARY,
            re_constants.AT_NON_BOUNDARY,
        ):
            unsupported = "Unicode word boundaries"
        elif kind == re_constants.AT and value == re_constants.AT_END_STRING:
            unsupported = "\\Z anchors"
        else:
            continue
        raise ValueError(
            f"Regex uses unsupported feature for structured outputs: {unsupported} are "
            "unsupported. Only basic matching constructs are supported."
        )
    if _starts_with_anchor(parsed):
        raise ValueError(
            "Regex does not have a anchored universal start state: it begins with an anchor (^). "
            f"The whole text is matched as it is; leave anchors out. Pattern: {pattern[:200]}"
        )
    if inside := anchor_inside(pattern):
        raise ValueError(f"Regex uses {inside}, which allow no text. Pattern: {pattern[:200]}")


def _children(kind: Any, value: Any) -> list[Any]:
    """The sequences within a node of a parsed pattern."""
    if kind == re_constants.BRANCH:
        return list(value[1])
    if kind == re_constants.SUBPATTERN:
        return [value[3]]
    if kind in (re_constants.MAX_REPEAT, re_constants.MIN_REPEAT):
        return [value[2]]
    return []


def _nodes(parsed: Any) -> Iterator[tuple[Any, Any]]:
    for kind, value in parsed:
        yield kind, value
        for child in _children(kind, value):
            yield from _nodes(child)


def _starts_with_anchor(parsed: Any) -> bool:
    """Whether an anchor comes before any character, in some branch."""
    for kind, value in parsed:
        if kind == re_constants.AT:
            return True
        children = _children(kind, value)
        if any(map(_starts_with_anchor, children)):
            return True
        if not children or any(map(len, children)):
            return False
    return False
