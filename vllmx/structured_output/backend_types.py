# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/backend_types.py @ v0.25.0
"""What a library that compiles grammars has to offer, and what a request may ask it for."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class StructuredOutputOptions(enum.Enum):
    """Kinds of constraint."""

    JSON = enum.auto()
    """Text that a JSON schema describes."""
    JSON_OBJECT = enum.auto()
    """Any JSON object."""
    REGEX = enum.auto()
    """Text that a regular expression matches as a whole."""
    GRAMMAR = enum.auto()
    """Text of a context-free grammar, EBNF (GBNF) or Lark."""
    CHOICE = enum.auto()
    """One of some texts."""
    STRUCTURAL_TAG = enum.auto()
    """Free text with structured parts between tags."""


StructuredOutputKey = tuple[StructuredOutputOptions, str]
"""Kind and text of a constraint; equal keys compile to equal grammars."""


@dataclass(frozen=True)
class JSONOptions:
    """How JSON may be written."""

    disable_any_whitespace: bool = False
    """No whitespace between its parts."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names, unless it says otherwise."""
    whitespace_pattern: str | None = None
    """Regular expression of the whitespace between its parts; None: any."""


class StructuredOutputGrammar(ABC):
    """A compiled grammar and how far one request is in it."""

    @abstractmethod
    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        """Go on by `tokens`; False if the grammar does not allow them."""

    @abstractmethod
    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """The first ones of `tokens` that the grammar allows; it stays where it is."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Go back by as many tokens."""

    @abstractmethod
    def fill_bitmask(self, bitmask: np.ndarray, batch_index: int) -> None:
        """Set bit t % 32 of int32 `bitmask[batch_index, t // 32]` for the tokens t that may come,
        and clear the others."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text is complete and its end token was taken in."""

    @abstractmethod
    def reset(self) -> None:
        """Go back to the begin."""

    @staticmethod
    def fill_bitmasks(grammars: Sequence[Any], bitmask: np.ndarray, indices: list[int]) -> None:
        """`fill_bitmask` of several grammars of this class, each into its row."""
        for grammar, index in zip(grammars, indices, strict=True):
            grammar.fill_bitmask(bitmask, index)


@dataclass
class StructuredOutputBackend(ABC):
    """A library that compiles grammars for one tokenizer."""

    vllm_config: Any
    """Of the engine."""
    tokenizer: Any
    """The model's."""
    vocab_size: int
    """Width of the logits, which may be more than the tokenizer has."""

    @abstractmethod
    def compile_grammar(
        self,
        request_type: StructuredOutputOptions,
        grammar_spec: str,
        options: JSONOptions | None = None,
    ) -> StructuredOutputGrammar:
        """A grammar at its begin; `options` None: those of the config.

        May run in any thread. ValueError or RuntimeError where it can't be compiled.
        """

    def prepare(self) -> None:  # noqa: B027 - most have nothing to make
        """Make what holds the interpreter for long, before there are requests."""

    def allocate_token_bitmask(self, max_num_seqs: int) -> np.ndarray:
        """Rows that allow everything, int32 [max_num_seqs, ceil(vocab_size / 32)]."""
        import numpy as np

        return np.full((max_num_seqs, -(-self.vocab_size // 32)), -1, dtype=np.int32)

    @abstractmethod
    def destroy(self) -> None:
        """Let go of what the library holds."""

    def json_options(self, options: JSONOptions | None) -> JSONOptions:
        """`options`, or what the config says."""
        if options is not None:
            return options
        config = self.vllm_config.structured_outputs_config
        return JSONOptions(config.disable_any_whitespace, config.disable_additional_properties)

    @property
    def num_speculative_tokens(self) -> int:
        """Most drafts of a request in a step, which a grammar may have to go back by."""
        speculative = self.vllm_config.speculative_config
        return 0 if speculative is None else speculative.num_speculative_tokens
