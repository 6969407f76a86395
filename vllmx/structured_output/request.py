# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/structured_output/request.py @ v0.25.0
"""The grammar of a request, from the time it is compiled."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

    @property
    def is_grammar_ready(self) -> bool:
        """Whether nothing is being compiled any more."""
        return not isinstance(self._grammar, Future) or self._grammar.done()

    @property
    def grammar(self) -> Any | None:
        """The compiled grammar, None until it is there; raises what the compilation raised."""
        if isinstance(self._grammar, Future):
            if not self._grammar.done():
                return None
            self._grammar = self._grammar.result()
        return self._grammar

    @grammar.setter
    def grammar(self, grammar: Future[Any] | Any) -> None:
        self._grammar = grammar
