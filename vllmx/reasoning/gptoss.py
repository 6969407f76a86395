# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/gptoss_reasoning_parser.py @ v0.25.0
"""gpt-oss, whose answer is the message of a channel of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.reasoning import ReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer

MOST_BETWEEN = 20
"""Tokens between the channel's name and its message: a constraint may be named there."""


class GptOssReasoningParser(ReasoningParser):
    """The reasoning ends where the message of channel `final` begins."""

    keeps_special_tokens = True

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """See ReasoningParser."""
        super().__init__(tokenizer, *args, **kwargs)
        self.prefix = list(tokenizer.encode("<|channel|>final", add_special_tokens=False))
        (self.message_id,) = tokenizer.encode("<|message|>", add_special_tokens=False)
        (self.end_of_message_id,) = tokenizer.encode("<|end|>", add_special_tokens=False)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last message is that of the final channel."""
        width = len(self.prefix)
        for i in range(len(input_ids) - width, -1, -1):
            if input_ids[i] == self.end_of_message_id:
                return False
            if list(input_ids[i : i + width]) == self.prefix:
                after = input_ids[i + width : i + width + MOST_BETWEEN]
                if self.message_id in after:
                    return True
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """The same of the last tokens, among which the end would be."""
        window = len(self.prefix) + MOST_BETWEEN + 1 + len(tuple(delta_ids))
        return self.is_reasoning_end(input_ids[max(0, len(input_ids) - window) :])

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """What comes after the final channel's begin."""
        for count in range(1, len(input_ids) + 1):
            if self.is_reasoning_end(input_ids[:count]):
                return input_ids[count:]
        return []
