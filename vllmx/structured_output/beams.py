# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/entrypoints/generate/beam_search/offline.py @ v0.25.0
"""One constraint for the beams of a search, each of which is somewhere else in its grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vllmx.sampling_params import SamplingParams, StructuredOutputsParams
from vllmx.structured_output.validation import validate_structured_outputs

if TYPE_CHECKING:
    from vllmx.structured_output.manager import StructuredOutputManager


class BeamGrammar:
    """Says which tokens may follow those of a beam."""

    def __init__(self, manager: StructuredOutputManager, asked: StructuredOutputsParams) -> None:
        """Raises VLLMValidationError for a constraint that no backend enforces, and ValueError for
        one that can't be compiled or has no word."""
        params = SamplingParams(structured_outputs=asked)
        config = manager.vllm_config
        validate_structured_outputs(
            params, config.model_config, config.structured_outputs_config, manager.tokenizer
        )
        assert params.structured_outputs is not None
        self.manager, self.params = manager, params.structured_outputs
        self.manager.compile(self.params, check=True)  # what can't be is known before the search
        vocab_size = config.model_config.get_vocab_size()
        self._bitmask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self._vocab_size = vocab_size

    def allowed(self, tokens: list[int]) -> list[int]:
        """Ids that may follow `tokens`, a beam's own; none where its grammar has ended."""
        # A grammar can't be copied, so each beam goes through its tokens again.
        grammar = self.manager.compile(self.params)
        if tokens:
            grammar.accept_tokens("beam", tokens)
        if grammar.is_terminated():
            return []
        grammar.fill_bitmask(self._bitmask, 0)
        bits = np.unpackbits(self._bitmask.view(np.uint8), bitorder="little")
        return np.flatnonzero(bits[: self._vocab_size]).tolist()
