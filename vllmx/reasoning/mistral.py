# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/mistral_reasoning_parser.py @ v0.25.0
"""Mistral's reasoning models, which may also answer at once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from vllmx.reasoning.basic_parsers import BaseThinkingReasoningParser


class MistralReasoningParser(BaseThinkingReasoningParser):
    """Only what stands between both tokens is reasoning; content may come before it."""

    start_token = "[THINK]"
    end_token = "[/THINK]"
    keeps_special_tokens = True

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the end token follows the last start token."""
        ended = False
        for token_id in reversed(input_ids):
            if token_id == self.start_token_id:
                return ended
            ended |= token_id == self.end_token_id
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The end token has come, or there was no start."""
        return self.end_token_id in delta_ids or self.start_token_id not in input_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """What stands before the start token and after the end token."""
        end = input_ids.index(self.end_token_id) if self.end_token_id in input_ids else None
        before = input_ids if end is None else input_ids[:end]
        if self.start_token_id in before:
            before = before[: before.index(self.start_token_id)]
        return before if end is None else before + input_ids[end + 1 :]

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """An end token without a start is left out of the content."""
        before, start, after = model_output.partition(self.start_token)
        if not start:
            return None, before.replace(self.end_token, "", 1)
        reasoning, _, rest = after.partition(self.end_token)
        return reasoning, before + rest or None
