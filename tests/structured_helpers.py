# SPDX-License-Identifier: Apache-2.0
"""Backends of structured output over a tokenizer of 400 tokens."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from front_helpers import byte_level_tokenizer, vllm_config

from vllmx.config import SpeculativeConfig, StructuredOutputsConfig
from vllmx.exceptions import VLLMValidationError
from vllmx.reasoning import ReasoningParser
from vllmx.sampling_params import SamplingParams, StructuredOutputsParams
from vllmx.structured_output.backend_guidance import GuidanceBackend
from vllmx.structured_output.backend_lm_format_enforcer import LMFormatEnforcerBackend
from vllmx.structured_output.backend_outlines import OutlinesBackend
from vllmx.structured_output.backend_types import (
    JSONOptions,
    StructuredOutputBackend,
    StructuredOutputGrammar,
    StructuredOutputOptions,
)
from vllmx.structured_output.backend_xgrammar import XgrammarBackend
from vllmx.structured_output.validation import validate_structured_outputs

VOCAB = 416
BACKENDS = {
    "xgrammar": XgrammarBackend,
    "guidance": GuidanceBackend,
    "outlines": OutlinesBackend,
    "lm-format-enforcer": LMFormatEnforcerBackend,
}
TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.eos_token_id
Kind = StructuredOutputOptions


def config(drafts: int = 0, **settings: Any) -> Any:
    made = vllm_config(vocab_size=VOCAB, **settings)
    if drafts:
        made.speculative_config = SpeculativeConfig(drafts, model="ngram")
    return made


@cache
def backend(name: str, drafts: int = 0) -> StructuredOutputBackend:
    if name == "lm-format-enforcer":
        drafts = 0
    return BACKENDS[name](config(drafts), TOKENIZER, VOCAB)


def compiled(name: str, kind: Kind, spec: str, **options: Any) -> StructuredOutputGrammar:
    return backend(name).compile_grammar(kind, spec, JSONOptions(**options))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def allowed(grammar: StructuredOutputGrammar) -> set[int]:
    """The tokens that a grammar's bitmask lets through."""
    bitmask = np.zeros((2, VOCAB // 32), dtype=np.int32)
    grammar.fill_bitmask(bitmask, 1)
    assert not bitmask[0].any()
    return set(np.flatnonzero(np.unpackbits(bitmask[1].view(np.uint8), bitorder="little")))


def matches(grammar: StructuredOutputGrammar, text: str) -> bool:
    """Whether `text` and the end are allowed, by the bitmask of every step; goes on by them."""
    for token in [*ids(text), END]:
        if token not in allowed(grammar):
            assert grammar.validate_tokens([token]) == []
            return False
        assert grammar.accept_tokens("r", [token])
    assert grammar.is_terminated()
    return True


def validate(
    params: StructuredOutputsParams, backend: str = "auto", **settings: Any
) -> StructuredOutputsParams:
    """A copy of `params` that names its backend."""
    sampling = SamplingParams(structured_outputs=params)
    config = StructuredOutputsConfig(backend=backend, **settings)
    validate_structured_outputs(sampling, SimpleNamespace(), config, TOKENIZER)
    assert sampling.structured_outputs is not None
    return sampling.structured_outputs


def refusal(params: StructuredOutputsParams | dict[str, Any], backend: str = "auto") -> str:
    """The words by which `params`, or those of such fields, are refused."""
    with pytest.raises(VLLMValidationError) as caught:
        given = StructuredOutputsParams(**params) if isinstance(params, dict) else params
        validate(given, backend)
    assert caught.value.parameter == "structured_outputs"
    return str(caught.value)


THINK_END = ids("x")[0]


class EndsAtX(ReasoningParser):
    """Reasoning ends with an x."""

    def is_reasoning_end(self, input_ids):
        return THINK_END in input_ids

    def is_reasoning_end_streaming(self, input_ids, delta_ids):
        return THINK_END in delta_ids
