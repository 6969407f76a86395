# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/hunyuan_a13b_reasoning_parser.py, hy_v3_reasoning_parser.py @ v0.25.0
"""Hunyuan A13B and Hy 3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllmx.reasoning.basic_parsers import Qwen3ReasoningParser
from vllmx.reasoning.text_markers import TextMarkerReasoningParser

if TYPE_CHECKING:
    from vllmx.model_loader.tokenizer import Tokenizer

ANSWER_END = "\n</answer>"


class HunyuanA13BReasoningParser(TextMarkerReasoningParser):
    """`<think>\\nreasoning\\n</think>\\n<answer>\\ncontent\\n</answer>`."""

    starts = ("<think>\n",)
    ends = ("\n</think>\n<answer>\n", "</think>\n<answer>\n")

    def clean(self, content: str, last: bool) -> str:
        """Without the marker at its end."""
        before, end, after = content.partition(ANSWER_END)
        if end or last:
            return before + after
        lengths = range(len(ANSWER_END) - 1, 0, -1)
        kept = next((n for n in lengths if content.endswith(ANSWER_END[:n])), 0)
        cut = len(content) - kept
        self._held = content[cut:]
        return content[:cut]


class HYV3ReasoningParser(Qwen3ReasoningParser):
    """Hy 3: a suffix of the tokenizer's own is part of its tokens; without `reasoning_effort` it
    does not reason."""

    drops_ends = False

    def __init__(self, tokenizer: Tokenizer, *args: Any, **kwargs: Any) -> None:
        """`chat_template_kwargs`: what the template was told."""
        suffix = (getattr(tokenizer, "init_kwargs", None) or {}).get("token_suffix") or ""
        self.start_token, self.end_token = f"<think{suffix}>", f"</think{suffix}>"
        super().__init__(tokenizer, *args, **kwargs)
        told = kwargs.get("chat_template_kwargs") or {}
        effort = told.get("reasoning_effort") or kwargs.get("reasoning_effort")
        self.thinks = (effort or "no_think") != "no_think"
