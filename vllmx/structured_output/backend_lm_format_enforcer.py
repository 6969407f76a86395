# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_lm_format_enforcer.py @ v0.25.0
"""Grammars of the library lm-format-enforcer, which walks a tree of the vocabulary in Python."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllmx.structured_output.backend_types import (
    JSONOptions,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllmx.structured_output.schema_features import close_objects
from vllmx.structured_output.vocabulary import end_token_ids, token_bytes

if TYPE_CHECKING:
    import numpy as np


@dataclass
class LMFormatEnforcerBackend(StructuredOutputBackend):
    """Compiles with lm-format-enforcer."""

    @cached_property
    def tokenizer_data(self) -> Any:
        """The tree of the vocabulary."""
        return self._make_tree(frozenset())

    @cached_property
    def json_tokenizer_data(self) -> Any:
        """The same for JSON, whose strings hold no control characters; the library knows of line
        ends alone."""
        return self._make_tree(set(range(32)) - set(b"\n\r"))

    def _make_tree(self, without: Container[int]) -> Any:
        """The tree of all tokens but those with a byte `without`."""
        import lmformatenforcer

        pieces = token_bytes(self.tokenizer, self.vocab_size)

        def decode(token_ids: Iterable[int]) -> str:
            return b"".join(pieces[i] for i in token_ids).decode(errors="replace").rstrip("\ufffd")

        tokens = []
        for token_id, data in enumerate(pieces):
            text = data.decode(errors="replace")
            # Whole characters stand for themselves, whatever came before.
            if data and not any(byte in without for byte in data):
                tokens.append((token_id, text, text.encode() == data))
        ends = end_token_ids(self.vllm_config.model_config, self.tokenizer, self.vocab_size)
        return lmformatenforcer.TokenEnforcerTokenizerData(
            tokens, decode, ends, use_bitmask=True, vocab_size=self.vocab_size
        )

    def prepare(self) -> None:
        """See StructuredOutputBackend: the trees are made in Python."""
        _ = self.tokenizer_data, self.json_tokenizer_data

    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        options: JSONOptions | None = None,
    ) -> LMFormatEnforcerGrammar:
        """See StructuredOutputBackend."""
        import lmformatenforcer

        if self.num_speculative_tokens > 0:
            raise ValueError("LM Format Enforcer backend does not support speculative tokens")
        parser = character_parser(request_type, grammar_spec, self.json_options(options))
        kind = StructuredOutputOptions
        is_json = request_type in (kind.JSON, kind.JSON_OBJECT)
        tree = self.json_tokenizer_data if is_json else self.tokenizer_data
        return LMFormatEnforcerGrammar(lmformatenforcer.TokenEnforcer(tree, parser))

    def destroy(self) -> None:
        """Drop the trees."""
        self.__dict__.pop("tokenizer_data", None)
        self.__dict__.pop("json_tokenizer_data", None)


@dataclass
class LMFormatEnforcerGrammar(StructuredOutputGrammar):
    """The tokens so far, by which the library finds its state."""

    enforcer: Any
    tokens: list[int] = field(default_factory=list)

    def _allows(self, tokens: list[int], token: int) -> bool:
        return bool(self.enforcer.get_allowed_tokens(tokens).is_token_allowed(token))

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """See StructuredOutputGrammar."""
        allowed = self.validate_tokens(tokens)
        if len(allowed) < len(tokens):
            return False
        self.tokens += tokens
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """See StructuredOutputGrammar."""
        seen = self.tokens.copy()
        for count, token in enumerate(tokens):
            if not self._allows(seen, token):
                return tokens[:count]
            seen.append(token)
        return tokens

    def rollback(self, num_tokens: int) -> None:
        """See StructuredOutputGrammar."""
        if num_tokens > 0:
            del self.tokens[-num_tokens:]

    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """See StructuredOutputGrammar."""
        bitmask[batch_index] = self.enforcer.get_allowed_tokens(self.tokens).allowed_tokens

    def is_terminated(self) -> bool:
        """See StructuredOutputGrammar."""
        return bool(self.tokens) and self.tokens[-1] in self.enforcer.eos_token_id

    def reset(self) -> None:
        """See StructuredOutputGrammar."""
        self.tokens.clear()


def character_parser(
    request_type: StructuredOutputOptions, grammar_spec: str, options: JSONOptions
) -> Any:
    """The library's parser of a constraint; ValueError for a kind that it has none for."""
    import lmformatenforcer as lmfe

    kind = StructuredOutputOptions
    if request_type == kind.JSON:
        schema = json.loads(grammar_spec)
        if options.disable_additional_properties:
            schema = close_objects(schema)
        return lmfe.JsonSchemaParser(schema)
    if request_type == kind.JSON_OBJECT:
        return lmfe.JsonSchemaParser({"type": "object"})  # None is any JSON to it
    if request_type == kind.REGEX:
        return lmfe.RegexParser(grammar_spec)
    if request_type == kind.CHOICE:
        return lmfe.UnionParser([lmfe.StringParser(text) for text in json.loads(grammar_spec)])
    raise ValueError(f"Invalid request type for LM Format Enforcer backend({request_type!s})")
