# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/basic_parsers.py, deepseek_r1_reasoning_parser.py,
#   qwen3_engine_reasoning_parser.py @ v0.25.0
"""Parsers of models whose reasoning stands between two tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.reasoning import ReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer


class BaseThinkingReasoningParser(ReasoningParser):
    """Reasoning begins with `start_token`, which a chat template may have written already, and
    ends with `end_token`."""

    start_token: str = ""
    end_token: str = ""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """RuntimeError for a vocabulary without the two tokens."""
        super().__init__(tokenizer, *args, **kwargs)
        if not tokenizer:
            raise ValueError("The model tokenizer must be passed to the ReasoningParser.")
        if not self.start_token or not self.end_token:
            raise ValueError("start_token and end_token must be defined in subclasses")
        start_token_id = self.vocab.get(self.start_token)
        end_token_id = self.vocab.get(self.end_token)
        if start_token_id is None or end_token_id is None:
            raise RuntimeError(
                f"{type(self).__name__} reasoning parser could not locate think start/end tokens "
                f"in the tokenizer: {self.start_token} and {self.end_token}"
            )
        self.start_token_id: int = start_token_id
        self.end_token_id: int = end_token_id

    @property
    def reasoning_start_str(self) -> str:
        """The token's text."""
        return self.start_token

    @property
    def reasoning_end_str(self) -> str:
        """The token's text."""
        return self.end_token

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the last of the two tokens in `input_ids` is the end."""
        for token_id in reversed(input_ids):
            if token_id == self.start_token_id:
                return False
            if token_id == self.end_token_id:
                return True
        return False

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """Whether the end token is in `delta_ids`."""
        return self.end_token_id in delta_ids

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """What comes after the first end token; nothing where there is none, or nothing yet."""
        if self.end_token_id not in input_ids[:-1]:
            return []
        return input_ids[input_ids.index(self.end_token_id) + 1 :]

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """Tokens between the two, which may be nested."""
        count = depth = 0
        for token_id in token_ids:
            if token_id == self.start_token_id:
                depth += 1
            elif token_id == self.end_token_id:
                depth = max(0, depth - 1)
            elif depth:
                count += 1
        return count


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """DeepSeek R1 and what was distilled from it."""

    start_token = "<think>"
    end_token = "</think>"


class Qwen3ReasoningParser(BaseThinkingReasoningParser):
    """Qwen 3, which does not reason where its template is told `enable_thinking=False`."""

    start_token = "<think>"
    end_token = "</think>"

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """`chat_template_kwargs`: what the template was told."""
        super().__init__(tokenizer, *args, **kwargs)
        told = kwargs.get("chat_template_kwargs") or {}
        self.thinks = bool(told.get("enable_thinking", True))

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Past its reasoning, or without one."""
        return not self.thinks or super().is_reasoning_end(input_ids)
