# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_xgrammar.py @ v0.25.0
"""Grammars of the library xgrammar: the first choice, with masks that are ready before they are
asked for."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from vllmx.structured_output.backend_types import (
    JSONOptions,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllmx.structured_output.structural_tags import parse_structural_tag, parts_of
from vllmx.structured_output.utils import compile_regex_with_timeout
from vllmx.structured_output.vocabulary import end_token_ids, token_bytes

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CACHE_BYTES = 512 << 20
"""Compiled grammars that are kept."""
MAX_WHITESPACE = 40
"""Characters of whitespace between two parts of JSON, so that an answer can't be nothing else."""


@dataclass
class XgrammarBackend(StructuredOutputBackend):
    """Compiles with xgrammar, which keeps what it has compiled."""

    @cached_property
    def compiler(self) -> Any:
        """Of JSON, patterns and choices: special tokens are no text."""
        return self._make_compiler(with_special=False)

    @cached_property
    def tag_compiler(self) -> Any:
        """Of grammars and tags, which may name special tokens by their spelling."""
        return self._make_compiler(with_special=True)

    def _make_compiler(self, with_special: bool) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo(
            token_bytes(self.tokenizer, self.vocab_size, with_special),
            xgrammar.VocabType.RAW,
            vocab_size=self.vocab_size,
            stop_token_ids=end_token_ids(
                self.vllm_config.model_config, self.tokenizer, self.vocab_size
            ),
        )
        return xgrammar.GrammarCompiler(info, max_threads=2, cache_limit_bytes=CACHE_BYTES)

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        options: JSONOptions | None = None,
    ) -> XgrammarGrammar:
        """See StructuredOutputBackend; choices are grammars by then."""
        import xgrammar

        kind = StructuredOutputOptions
        if request_type in (kind.JSON, kind.JSON_OBJECT):
            schema = grammar_spec if request_type == kind.JSON else '{"type": "object"}'
            compact = self.json_options(options).disable_any_whitespace
            compiled = self.compiler.compile_json_schema(
                schema,
                any_whitespace=not compact,
                max_whitespace_cnt=None if compact else MAX_WHITESPACE,
                separators=(",", ":") if compact else None,
            )
        elif request_type == kind.GRAMMAR:
            compiled = self.tag_compiler.compile_grammar(grammar_spec)
        elif request_type == kind.REGEX:
            compiled = compile_regex_with_timeout(self.compiler.compile_regex, grammar_spec)
        elif request_type == kind.STRUCTURAL_TAG:
            compact = self.json_options(options).disable_any_whitespace
            compiled = self.tag_compiler.compile_structural_tag(
                structural_tag_text(grammar_spec, compact)
            )
        else:
            raise ValueError(f"grammar is not of valid supported types. ({request_type!s})")
        return XgrammarGrammar(xgrammar.GrammarMatcher(compiled))

    def destroy(self) -> None:
        """Drop the compilers."""
        self.__dict__.pop("compiler", None)
        self.__dict__.pop("tag_compiler", None)


@dataclass
class XgrammarGrammar(StructuredOutputGrammar):
    """A matcher of xgrammar."""

    matcher: Any
    terminated: bool = False

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar."""
        if self.terminated:
            return False
        matcher = self.matcher
        for token in tokens:
            if not matcher.accept_token(token):
                return False
        self.terminated = matcher.is_terminated()
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        count = 0
        while count < len(tokens) and self.matcher.accept_token(tokens[count]):
            count += 1
        if count:
            self.matcher.rollback(count)
        return tokens[:count]

    def rollback(self, num_tokens: int) -> None:
        """See StructuredOutputGrammar."""
        if num_tokens > 0:
            self.matcher.rollback(num_tokens)
            self.terminated = self.matcher.is_terminated()

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """See StructuredOutputGrammar."""
        self.matcher.fill_next_token_bitmask(bitmask, batch_index)

    @staticmethod
    def fill_bitmasks(grammars: Sequence[Any], bitmask: np.ndarray, indices: list[int]) -> None:
        """The same for many, in the library's threads."""
        matchers = [grammar.matcher for grammar in grammars]
        _batch_matcher().batch_fill_next_token_bitmask(matchers, bitmask, indices)

    def is_terminated(self) -> bool:
        """See StructuredOutputGrammar."""
        return self.terminated

    def reset(self) -> None:
        """See StructuredOutputGrammar."""
        self.matcher.reset()
        self.terminated = False


@cache
def _batch_matcher() -> Any:
    import xgrammar

    return xgrammar.BatchGrammarMatcher()


def structural_tag_text(text: str, compact: bool = False) -> str:
    """A structural tag of either form as xgrammar takes it, with an end to the whitespace in JSON,
    or none of it with `compact`. ValueError for what is no tag, and for JSON that can't be so."""
    import xgrammar

    tag = parse_structural_tag(text)
    for part in list(parts_of(tag)):
        if part.kind != StructuredOutputOptions.JSON:
            continue
        settings = set(part.node) - {"type", "json_schema"}
        if not compact:
            part.node.setdefault("max_whitespace_cnt", MAX_WHITESPACE)
        elif settings and not (settings == {"style"} and part.node["style"] == "json"):
            raise ValueError(
                f"'disable_any_whitespace' together with '{min(settings)}' (at {part.path})"
            )
        else:
            grammar = xgrammar.Grammar.from_json_schema(
                json.dumps(part.value, ensure_ascii=False),
                any_whitespace=False,
                separators=(",", ":"),
            )
            part.node.clear()
            part.node.update(type="grammar", grammar=str(grammar))
    return json.dumps(tag, ensure_ascii=False)
