# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/basic_parsers.py, deepseek_r1_reasoning_parser.py,
#   qwen3_engine_reasoning_parser.py @ v0.25.0
"""Parsers of models whose reasoning stands between two tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllmx.reasoning import DeltaMessage, ReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer


class BaseThinkingReasoningParser(ReasoningParser):
    """Reasoning begins with `start_token`, which a chat template may have written already, and
    ends with `end_token`."""

    start_token: str = ""
    end_token: str = ""
    begins_with_reasoning = False
    """Whether an answer is reasoning from its begin on, without the start token."""
    drops_ends = False
    """Whether end tokens after the first one are left out of the content."""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """RuntimeError for a vocabulary without the two tokens; ValueError without a tokenizer, or
        for a class that does not name both."""
        super().__init__(tokenizer, *args, **kwargs)
        name, tokens = type(self).__name__, (self.start_token, self.end_token)
        if not tokenizer:
            raise ValueError(f"{name}: the model tokenizer must be passed to its constructor.")
        if not all(tokens):
            raise ValueError(f"{name}: start_token and end_token must be defined by the class.")
        found = {token: self.token_id(token) for token in tokens}
        ids = {token: token_id for token, token_id in found.items() if token_id is not None}
        missing = [token for token in tokens if token not in ids]
        if missing:
            raise RuntimeError(
                f"{name} reasoning parser could not locate think start/end tokens in the "
                f"tokenizer: no {' and no '.join(missing)}"
            )
        self.start_token_id, self.end_token_id = (ids[token] for token in tokens)
        self._tokens = tokens
        self._num_seen = 0
        self._started = self._ended = self._end_shown = False

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

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """All is reasoning until the end token, whether or not the start token is there."""
        before, start, after = model_output.partition(self.start_token)
        reasoning, _, content = (after if start else before).partition(self.end_token)
        return reasoning, self._content(content) or None

    def _content(self, text: str) -> str:
        """What of a text after the reasoning is shown."""
        return text.replace(self.end_token, "") if self.drops_ends else text

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """By the two tokens' ids; a delta that is the first of one says nothing."""
        if self._num_seen != len(previous_token_ids):  # what was before is new to this parser
            self._started = self.start_token_id in previous_token_ids
            self._ended = self.end_token_id in previous_token_ids
            self._end_shown = self.end_token in previous_text
        self._num_seen = len(previous_token_ids) + len(delta_token_ids)
        had_started, had_ended = self._started, self._ended
        starts, ends = self.start_token_id in delta_token_ids, self.end_token_id in delta_token_ids
        self._started |= starts
        self._ended |= ends
        if self._end_shown:
            return DeltaMessage(content=self._content(delta_text))
        # A text may come later than its tokens, so that the end token's text comes after its id.
        late = self.end_token in delta_text
        self._end_shown = late
        first = (starts and not had_started) or (ends and not had_ended)
        if len(delta_token_ids) == 1 and first and delta_text in ("", *self._tokens):
            return None
        if (had_ended and not late) or not (self._started or self.begins_with_reasoning):
            return DeltaMessage(content=self._content(delta_text))
        if starts and not had_started:
            before, start, after = delta_text.partition(self.start_token)
            delta_text = after if start else before
        reasoning, end, content = delta_text.partition(self.end_token)
        return DeltaMessage(reasoning or None, (self._content(content) or None) if end else None)


class DeepSeekR1ReasoningParser(BaseThinkingReasoningParser):
    """DeepSeek R1 and what was distilled from it."""

    start_token = "<think>"
    end_token = "</think>"
    begins_with_reasoning = True


class MiniMaxM2ReasoningParser(DeepSeekR1ReasoningParser):
    """MiniMax M2, which writes no start token."""


class Qwen3ReasoningParser(DeepSeekR1ReasoningParser):
    """Qwen 3, which does not reason where its template is told `enable_thinking=False`."""

    drops_ends = True
    told_by: tuple[str, ...] = ("enable_thinking",)
    """Arguments of the template, of which one that is false switches the reasoning off."""

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """`chat_template_kwargs`: what the template was told."""
        super().__init__(tokenizer, *args, **kwargs)
        told = kwargs.get("chat_template_kwargs") or {}
        self.thinks = all(told.get(name, True) for name in self.told_by)

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Past its reasoning, or without one."""
        return not self.thinks or super().is_reasoning_end(input_ids)

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """All is content where there is no reasoning."""
        if not self.thinks:
            return None, self._content(model_output)
        return super().extract_reasoning(model_output, request)

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """See BaseThinkingReasoningParser; all is content where there is no reasoning."""
        if not self.thinks:
            return DeltaMessage(content=self._content(delta_text))
        texts = (previous_text, current_text, delta_text)
        ids = (previous_token_ids, current_token_ids, delta_token_ids)
        return super().extract_reasoning_streaming(*texts, *ids)


class SeedOssReasoningParser(Qwen3ReasoningParser):
    """Seed-OSS."""

    start_token = "<seed:think>"
    end_token = "</seed:think>"


class Glm45ReasoningParser(Qwen3ReasoningParser):
    """GLM 4.5 to 4.7."""


class KimiK2ReasoningParser(Qwen3ReasoningParser):
    """Kimi K2, whose template is told `thinking=False`."""

    told_by = ("thinking", "enable_thinking")


class NemotronV3ReasoningParser(Qwen3ReasoningParser):
    """Nemotron 3. `force_nonempty_content` makes an answer that is all reasoning its content."""

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """The two change places where there would be no content, and it was asked for."""
        reasoning, content = super().extract_reasoning(model_output, request)
        told = getattr(request, "chat_template_kwargs", None) or {}
        unwanted = told.get("enable_thinking") is False or told.get("force_nonempty_content")
        return (content, reasoning) if unwanted and content is None else (reasoning, content)
