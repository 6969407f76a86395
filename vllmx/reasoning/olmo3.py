# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/olmo3_reasoning_parser.py @ v0.25.0
"""OLMo 3, whose markers are no tokens of their own."""

from __future__ import annotations

from vllmx.reasoning.text_markers import TextMarkerReasoningParser


class Olmo3ReasoningParser(TextMarkerReasoningParser):
    """Its template may have written the start already."""

    starts = ("<think>",)
    ends = ("</think>",)
    start_is_optional = True
