# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/reasoning/step3_reasoning_parser.py @ v0.25.0
"""Step3, which ends its reasoning with a token and begins it with none."""

from __future__ import annotations

from collections.abc import Sequence

from vllmx.reasoning.basic_parsers import DeepSeekR1ReasoningParser


class Step3ReasoningParser(DeepSeekR1ReasoningParser):
    """All before the first end token is reasoning, a start token too."""

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        """Whether the end token is there."""
        return self.end_token_id in input_ids
