# SPDX-License-Identifier: Apache-2.0
"""The sampling node of the config becomes SamplingParams."""

from __future__ import annotations

from typing import Any

from vllmx.config import SamplingConfig
from vllmx.exceptions import UserError
from vllmx.sampling_params import RequestOutputKind, SamplingParams


def given(sampling: SamplingConfig) -> dict[str, Any]:
    """The fields that were set; raises VLLMValidationError at once for a value out of range."""
    values = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    values = {name: value for name, value in values.items() if value is not None}
    SamplingParams(**values)
    return values


def sampling_params(defaults: SamplingParams, fields: dict[str, Any]) -> SamplingParams:
    """`fields` over the model's `defaults`, streamed as deltas."""
    values = {name: getattr(defaults, name) for name in SamplingConfig.__dataclass_fields__}
    return SamplingParams(**{**values, **fields}, output_kind=RequestOutputKind.DELTA)


def check_shown(fields: dict[str, Any], output: str) -> None:
    """UserError if log-probabilities are asked for where only text is printed."""
    if output == "text":
        for name in ("logprobs", "prompt_logprobs"):
            if name in fields:
                raise UserError(
                    f"sampling.{name}: text output cannot show them; add --output json."
                )
