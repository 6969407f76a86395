# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/deepseek_v3_reasoning_parser.py @ v0.25.0
"""Models that reason only where their template is told so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.reasoning import DeltaMessage, ReasoningParser
from vllmx.reasoning.basic_parsers import DeepSeekR1ReasoningParser
from vllmx.reasoning.identity import IdentityReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer


class DeepSeekV3ReasoningParser(ReasoningParser):
    """As DeepSeek R1 with `thinking` or `enable_thinking`, else all is content."""

    thinks = False
    """Where the template is told nothing."""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """`chat_template_kwargs`: what the template was told."""
        super().__init__(tokenizer, *args, **kwargs)
        told = kwargs.get("chat_template_kwargs") or {}
        names = [name for name in ("thinking", "enable_thinking") if told.get(name) is not None]
        thinks = any(told[name] for name in names) if names else self.thinks
        parser: type[ReasoningParser] = IdentityReasoningParser
        self._parser = (DeepSeekR1ReasoningParser if thinks else parser)(tokenizer)

    @property
    def reasoning_start_str(self) -> str | None:
        """See ReasoningParser."""
        return self._parser.reasoning_start_str

    @property
    def reasoning_end_str(self) -> str | None:
        """See ReasoningParser."""
        return self._parser.reasoning_end_str

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """See ReasoningParser."""
        return self._parser.is_reasoning_end(input_ids)

    def is_reasoning_end_streaming(
        self, input_ids: Sequence[int], delta_ids: Iterable[int]
    ) -> bool:
        """See ReasoningParser."""
        return self._parser.is_reasoning_end_streaming(input_ids, delta_ids)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """See ReasoningParser."""
        return self._parser.extract_content_ids(input_ids)

    def count_reasoning_tokens(self, token_ids: Sequence[int]) -> int:
        """See ReasoningParser."""
        return self._parser.count_reasoning_tokens(token_ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """See ReasoningParser."""
        return self._parser.extract_reasoning(model_output, request)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """See ReasoningParser."""
        texts = (previous_text, current_text, delta_text)
        ids = (previous_token_ids, current_token_ids, delta_token_ids)
        return self._parser.extract_reasoning_streaming(*texts, *ids)


class DeepSeekV3WithThinkingReasoningParser(DeepSeekV3ReasoningParser):
    """The same for models that reason unless they are told not to."""

    thinks = True
