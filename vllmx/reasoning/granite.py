# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/granite_reasoning_parser.py @ v0.25.0
"""Granite 3, which says in words what comes."""

from __future__ import annotations

from vllmx.reasoning.text_markers import TextMarkerReasoningParser


class GraniteReasoningParser(TextMarkerReasoningParser):
    """Quantised models write `Here's` where others write `Here is`."""

    starts = ("Here is my thought process:", "Here's my thought process:")
    ends = ("Here is my response:", "Here's my response:")
