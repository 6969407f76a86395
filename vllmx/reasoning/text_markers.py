# SPDX-License-Identifier: Apache-2.0
"""Reasoning between texts that are several tokens, which a stream may cut anywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vllmx.reasoning import DeltaMessage, ReasoningParser


class TextMarkerReasoningParser(ReasoningParser):
    """An answer is `start reasoning end content`, each marker being one of several texts.

    A text that does not begin with a start is content, unless `start` is optional.
    """

    starts: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    start_is_optional = False

    def __init__(self, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        """See ReasoningParser."""
        super().__init__(tokenizer, *args, **kwargs)
        self._start_over()

    def _start_over(self) -> None:
        self._state, self._held, self._num_fed = "start", "", 0

    @property
    def reasoning_start_str(self) -> str:
        """The first of the texts."""
        return self.starts[0]

    @property
    def reasoning_end_str(self) -> str:
        """The first of the texts."""
        return self.ends[0]

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether one of the ends is in the text."""
        text = self.model_tokenizer.decode(list(input_ids))
        return any(end in text for end in self.ends)

    def extract_content_ids(self, input_ids: list[int]) -> list[int]:
        """The tokens after the one that completes the end."""
        for count in range(1, len(input_ids) + 1):
            if self.is_reasoning_end(input_ids[:count]):
                return input_ids[count:]
        return []

    def extract_reasoning(self, model_output: str, request: Any) -> tuple[str | None, str | None]:
        """As a stream of one delta."""
        reasoning, content = type(self)(self.model_tokenizer).feed(model_output, last=True)
        return reasoning or None, content or None

    def extract_reasoning_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
    ) -> DeltaMessage | None:
        """What may become a marker is kept until it is clear."""
        if self._num_fed != len(previous_text or ""):  # what was before is new to this parser
            self._start_over()
            self.feed(previous_text)
        reasoning, content = self.feed(delta_text)
        if not (reasoning or content):
            return None
        return DeltaMessage(reasoning or None, content or None)

    def feed(self, text: str, last: bool = False) -> tuple[str, str]:
        """(reasoning, content) that `text` brings to what was fed before; last: it is all."""
        self._num_fed += len(text)
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state == "start":
            found = next((start for start in self.starts if text.startswith(start)), None)
            if found is not None:
                text, self._state = text[len(found) :], "reasoning"
            elif not last and any(start.startswith(text) for start in self.starts):
                self._held = text
                return "", ""
            else:
                self._state = "reasoning" if self.start_is_optional else "content"
        if self._state == "reasoning":
            match = re.search("|".join(map(re.escape, self.ends)), text)
            if match is None:
                kept = 0 if last else self._possible_marker(text)
                cut = len(text) - kept
                self._held = text[cut:]
                return text[:cut], ""
            reasoning, text, self._state = text[: match.start()], text[match.end() :], "content"
        return reasoning, self.clean(text, last)

    def finish(self) -> DeltaMessage | None:
        """What might have become a marker and did not."""
        reasoning, content = self.feed("", last=True)
        if not (reasoning or content):
            return None
        return DeltaMessage(reasoning or None, content or None)

    def clean(self, content: str, last: bool) -> str:
        """What of the content's text is shown; `self._held` takes what is not clear yet."""
        return content

    def _possible_marker(self, text: str) -> int:
        """Length of the longest end of `text` with which one of the ends begins."""
        longest = max(map(len, self.ends)) - 1
        return next(
            (n for n in range(min(longest, len(text)), 0, -1) if self._begins(text[-n:])), 0
        )

    def _begins(self, text: str) -> bool:
        return any(end.startswith(text) for end in self.ends)
