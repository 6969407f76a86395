# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/ernie45_reasoning_parser.py @ v0.25.0
"""ERNIE 4.5, whose content may stand between two markers of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllmx.reasoning import DeltaMessage
from vllmx.reasoning.basic_parsers import DeepSeekR1ReasoningParser

RESPONSE_START, RESPONSE_END = "<response>", "</response>"


class Ernie45ReasoningParser(DeepSeekR1ReasoningParser):
    """`reasoning</think>\\n\\n<response>\\ncontent\\n</response>\\n`, or without the last two."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The content is what stands between its markers, if it has both."""
        reasoning, content = super().extract_reasoning(model_output, request)
        if content:
            start, end = content.find(RESPONSE_START), content.rfind(RESPONSE_END)
            if 0 <= start < end:
                content = content[start + len(RESPONSE_START) : end]
        return reasoning, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """The markers are left out, and line ends before the content."""
        texts = (previous_text, current_text, delta_text)
        ids = (previous_token_ids, current_token_ids, delta_token_ids)
        delta = super().extract_reasoning_streaming(*texts, *ids)
        if delta is None or delta.content is None:
            return delta
        content = delta.content
        _, ended, before = previous_text.rpartition(self.end_token)
        before = before if ended else ""
        if not before.strip("\n") or RESPONSE_START in content:
            content = content.lstrip("\n")
        content = content.replace(RESPONSE_START, "").partition(RESPONSE_END)[0]
        if before.rstrip("\n").endswith(RESPONSE_END):
            content = content.lstrip("\n")
        delta.content = content or None
        return delta if delta.content or delta.reasoning else None
