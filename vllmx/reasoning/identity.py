# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/identity_reasoning_parser.py, minimax_m2_reasoning_parser.py @ v0.25.0
"""Answers whose reasoning is not taken apart from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.reasoning import DeltaMessage, ReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer


class IdentityReasoningParser(ReasoningParser):
    """All is content."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Always."""
        return True

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Always."""
        return True

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """All of them."""
        return input_ids

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """All is content."""
        return None, model_output

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """All is content."""
        return DeltaMessage(content=delta_text) if delta_text else None


class MiniMaxM2AppendThinkReasoningParser(IdentityReasoningParser):
    """MiniMax M2, with the start token that its template has written put before its answer."""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """See ReasoningParser."""
        super().__init__(tokenizer, *args, **kwargs)
        self.end_token_id = self.token_id("</think>")
        self.start_token_id = self.token_id("<think>")

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last of the two tokens is the end."""
        tokens = (self.start_token_id, self.end_token_id)
        return next((i == self.end_token_id for i in reversed(input_ids) if i in tokens), False)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The same."""
        return self.is_reasoning_end(input_ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """All is content, and begins with the start token."""
        return None, "<think>" + model_output

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The same."""
        return DeltaMessage(content=delta_text if previous_token_ids else "<think>" + delta_text)
