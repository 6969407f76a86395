# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/request.py @ v0.25.0
"""The grammar of a request, from the time it is compiled."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from vllmx.structured_output.backend_types import StructuredOutputKey, StructuredOutputOptions

if TYPE_CHECKING:
    from vllmx.sampling_params import SamplingParams, StructuredOutputsParams


@dataclass
class StructuredOutputRequest:
    """What a request asks of its answer's structure, and how far the grammar is."""

    params: StructuredOutputsParams
    """The constraint."""
    _grammar: Future[Any] | Any | None = None
    reasoning_ended: bool | None = None
    """Whether the grammar applies already; None: not known yet."""
    reasoning_end_token_index: int | None = None
    """Position among all tokens of the last one that the grammar must not see."""
    reasoning_parser_kwargs: dict[str, Any] | None = None
    """Arguments of the request's reasoning parser."""
    reasoner: Any | None = None
    """That parser, one a request."""

    @staticmethod
    def from_sampling_params(
        sampling_params: SamplingParams | None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
    ) -> StructuredOutputRequest | None:
        """The constraint in `sampling_params`, None if there is none."""
        params = None if sampling_params is None else sampling_params.structured_outputs
        if params is None or params.all_constraints_none():
            return None
        return StructuredOutputRequest(
            params,
            reasoning_ended=reasoning_ended,
            reasoning_parser_kwargs=reasoning_parser_kwargs,
        )

    @cached_property
    def structured_output_key(self) -> StructuredOutputKey:
        """Kind and text of the constraint."""
        return get_structured_output_key(self.params)

    def _check_grammar_completion(self) -> bool:
        """Whether nothing is being compiled any more; takes in what was."""
        if isinstance(self._grammar, Future):
            if not self._grammar.done():
                return False
            self._grammar = self._grammar.result()
        return True

    @property
    def is_grammar_ready(self) -> bool:
        """Whether nothing is being compiled any more; raises what the compilation raised."""
        return self._check_grammar_completion()

    @property
    def failure(self) -> BaseException | None:
        """Why the grammar could not be compiled; None if it could, or that isn't known yet."""
        future = self._grammar
        if not isinstance(future, Future) or not future.done() or future.cancelled():
            return None
        return future.exception()

    def cancel(self) -> None:
        """Have the grammar not compiled for this request, which has ended, if it still is."""
        if isinstance(self._grammar, Future):
            self._grammar.cancel()

    @property
    def grammar(self) -> Any | None:
        """The compiled grammar, None until it is there; raises what the compilation raised."""
        return self._grammar if self._check_grammar_completion() else None

    @grammar.setter
    def grammar(self, grammar: Future[Any] | Any) -> None:
        self._grammar = grammar


def get_structured_output_key(params: StructuredOutputsParams) -> StructuredOutputKey:
    """Kind and text of a constraint; ValueError if there is none."""
    kind = StructuredOutputOptions
    if params.json is not None:
        return kind.JSON, _as_text(params.json)
    if params.json_object:
        return kind.JSON_OBJECT, ""
    if params.regex is not None:
        return kind.REGEX, params.regex
    if params.choice is not None:
        return kind.CHOICE, _as_text(params.choice)
    if params.grammar is not None:
        return kind.GRAMMAR, params.grammar
    if params.structural_tag is not None:
        return kind.STRUCTURAL_TAG, params.structural_tag
    raise ValueError("No valid structured output parameter found")


def _as_text(value: Any) -> str:
    # Characters as they are: escaped ones would be asked of the model, too.
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
