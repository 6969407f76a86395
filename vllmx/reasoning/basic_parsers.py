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
        """RuntimeError for a vocabulary without the two tokens; ValueError without a tokenizer, or
        for a class that does not name both."""
        super().__init__(tokenizer, *args, **kwargs)
        name, tokens = type(self).__name__, (self.start_token, self.end_token)
        if not tokenizer:
            raise ValueError(f"{name} was made without the model's tokenizer.")
        if not all(tokens):
            raise ValueError(f"{name} must name both its start_token and its end_token.")
        missing = [token for token in tokens if token not in self.vocab]
        if missing:
            raise RuntimeError(
                f"{name} reasoning parser could not locate think start/end tokens in the "
                f"tokenizer: no {' and no '.join(missing)}"
            )
        self.start_token_id, self.end_token_id = (self.vocab[token] for token in tokens)

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
