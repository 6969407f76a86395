# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_guidance.py @ v0.25.0
"""Grammars of the library llguidance: most of JSON schema, Lark, and masks computed when they are
asked for."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
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
from vllmx.structured_output.schema_features import close_objects
from vllmx.structured_output.vocabulary import end_token_ids

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

CACHED_GRAMMARS = 256
"""Compiled grammars that are kept."""


@dataclass
class GuidanceBackend(StructuredOutputBackend):
    """Compiles with llguidance."""

    def __post_init__(self) -> None:
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    @cached_property
    def ll_tokenizer(self) -> Any:
        """The library's view of the tokenizer."""
        import llguidance

        ends = end_token_ids(self.vllm_config.model_config, self.tokenizer, self.vocab_size)
        return llguidance.LLTokenizer(
            self.tokenizer.backend.to_str(),
            n_vocab=max(self.vocab_size, len(self.tokenizer)),
            eos_token=ends or None,
        )

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        options: JSONOptions | None = None,
    ) -> GuidanceGrammar:
        """See StructuredOutputBackend."""
        import llguidance

        text = serialize_guidance_grammar(
            request_type, grammar_spec, self.json_options(options), self.tokenizer
        )
        with self._lock:
            matcher = self._compiled.get(text)
            if matcher is None:
                matcher = llguidance.LLMatcher(self.ll_tokenizer, text)
                if error := matcher.get_error():
                    raise ValueError(f"Grammar error: {error}")
                matcher.compute_bitmask()
                if matcher.is_error():  # its mask then has the end token, which it does not accept
                    raise ValueError("Grammar error: no answer can be written")
                self._compiled[text] = matcher
                if len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(text)
            return GuidanceGrammar(matcher.deep_copy(), frozenset(self.ll_tokenizer.eos_tokens))

    def destroy(self) -> None:
        """Drop what was compiled."""
        self._compiled.clear()


@dataclass
class GuidanceGrammar(StructuredOutputGrammar):
    """A matcher of llguidance, which stops by itself where only the end can follow."""

    matcher: Any
    end_tokens: frozenset[int]
    terminated: bool = False
    _unseen: int = field(default=0, init=False)
    """Whether the end token was taken in without the matcher, which had stopped before."""

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar; what follows the end token does not count."""
        for token in tokens:
            if self.terminated:
                return True
            is_end = token in self.end_tokens
            if self.matcher.is_stopped():
                if not is_end or self.matcher.is_error():
                    return False
                self._unseen = 1
            elif not self.matcher.consume_token(token):
                return False
            self.terminated = is_end
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        if not tokens or self.terminated:
            return []
        if self.matcher.is_stopped():
            return tokens[:1] if tokens[0] in self.end_tokens else []
        return tokens[: self.matcher.validate_tokens(tokens)]

    def rollback(self, num_tokens: int) -> None:
        """See StructuredOutputGrammar."""
        if num_tokens > 0:
            self.matcher.rollback(num_tokens - self._unseen)
            self.terminated, self._unseen = False, 0

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """See StructuredOutputGrammar."""
        row = bitmask[batch_index]
        self.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def is_terminated(self) -> bool:
        """See StructuredOutputGrammar."""
        return self.terminated

    def reset(self) -> None:
        """See StructuredOutputGrammar."""
        self.matcher.reset()
        self.terminated, self._unseen = False, 0


def serialize_guidance_grammar(
    request_type: StructuredOutputOptions,
    grammar_spec: str,
    options: JSONOptions | None = None,
    tokenizer: Any | None = None,
) -> str:
    """The constraint as llguidance writes grammars. ValueError for what it can't.

    With a `tokenizer`, triggers that are tokens of it are those tokens, and no text.
    """
    import llguidance

    options = options or JSONOptions()
    kind = StructuredOutputOptions
    if request_type == kind.JSON:
        return _json_grammar(grammar_spec, options)
    if request_type == kind.JSON_OBJECT:
        return _json_grammar('{"type": "object"}', options)
    if request_type == kind.STRUCTURAL_TAG:
        tags = _struct_tags(json.loads(grammar_spec), options)
        are_tokens = tokenizer is not None and any(
            tokenizer.convert_tokens_to_ids(tag.trigger) is not None for tag in tags
        )
        return llguidance.StructTag.to_grammar(tags, assume_special=are_tokens)
    names: dict[Any, Any] = {kind.REGEX: "regex", kind.GRAMMAR: "grammar", kind.CHOICE: "choice"}
    return llguidance.grammar_from(names[request_type], grammar_spec)


def _json_grammar(schema: str, options: JSONOptions) -> str:
    from llguidance import LLMatcher

    if options.disable_additional_properties:
        schema = json.dumps(close_objects(json.loads(schema)), ensure_ascii=False)
    return LLMatcher.grammar_from_json_schema(schema, defaults=_settings(options))


def _settings(options: JSONOptions) -> Any:
    """How the library is to write JSON."""
    settings: dict[str, Any] = {"whitespace_flexible": not options.disable_any_whitespace}
    if options.whitespace_pattern is not None:
        settings["whitespace_pattern"] = options.whitespace_pattern
    return settings


def _struct_tags(tag: Any, options: JSONOptions) -> list[Any]:
    import llguidance

    if not isinstance(tag, dict) or "structures" not in tag:
        raise ValueError(
            "the guidance backend takes structural tags of `structures` and `triggers` only"
        )
    triggers = tag["triggers"]
    tags = []
    for item in tag["structures"]:
        begin = item["begin"]
        trigger = next((t for t in triggers if begin.startswith(t)), None)
        if trigger is None:
            raise ValueError(f"Trigger {begin} not found in triggers {triggers}")
        schema = item["schema"]
        if not isinstance(schema, dict):
            raise ValueError(f"the schema of tag {begin!r} must be an object")
        if options.disable_additional_properties:
            schema = close_objects(schema)
        grammar = {**schema, "x-guidance": _settings(options)}
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, grammar=grammar, end=item["end"])
        )
    if not tags:
        raise ValueError("No structural tags found in the grammar spec.")
    return tags
