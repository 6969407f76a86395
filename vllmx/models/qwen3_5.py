# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen3_5.py @ v0.25.0
"""Qwen3.5: Qwen3-Next with its input projections stored part by part. Text only.

A checkpoint's text weights lie under `model.` or, where the model has eyes, under
`model.language_model.`. Either is served by every class of this file; the vision tower and the
multi-token prediction head are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP
from vllmx.models.qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextForCausalLM,
    Qwen3NextModel,
)
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper

NESTED = "model.language_model."
FLAT = "model."
LEFT_OUT = ("model.visual.", "visual.", "mtp.")

QWEN3_5_MAPPER = WeightsMapper(
    stacked={
        **LLAMA_MAPPER.stacked,
        ".in_proj_qkv.": (".in_proj_qkvz.", "0"),
        ".in_proj_z.": (".in_proj_qkvz.", "1"),
        ".in_proj_b.": (".in_proj_ba.", "0"),
        ".in_proj_a.": (".in_proj_ba.", "1"),
    }
)
NESTED_MAPPER = replace(QWEN3_5_MAPPER, renamed={NESTED: FLAT})


class Qwen3_5DecoderLayer(Qwen3NextDecoderLayer):
    """Qwen3-Next's layer with the input projections of Qwen3.5."""

    gqa_interleaved_layout = False

    def make_mlp(self, config: HFConfig, layer_idx: int, **shared: Any) -> nn.Module:
        """One MLP, whatever the layer."""
        return LlamaMLP(config, **shared)


class Qwen3_5Model(Qwen3NextModel):
    """Embedding, layers, final norm."""

    layer_cls = Qwen3_5DecoderLayer


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    """Qwen3.5 with its output head."""

    hf_to_vllm_mapper = QWEN3_5_MAPPER
    model_cls = Qwen3_5Model

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load a checkpoint's (name, tensor) pairs; CheckpointError where they don't fit, or where
        some text weights are named as in the text-only model and some as in the one with eyes."""
        found, seen = _in_one_namespace(weights), []
        for name, tensor in found:
            seen.append((name, tensor))
            if name.startswith(FLAT):
                if name.startswith(NESTED):
                    self.hf_to_vllm_mapper = NESTED_MAPPER
                break
        super().load_weights(chain(seen, found))


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The text path of Qwen3.5 with eyes."""


def _in_one_namespace(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The text weights; CheckpointError names the two that disagree on where they lie."""
    first: dict[bool, str] = {}
    for name, tensor in weights:
        if name.startswith(LEFT_OUT):
            continue
        if name.startswith(FLAT):
            nested = name.startswith(NESTED)
            first.setdefault(nested, name)
            if len(first) == 2:
                raise CheckpointError(
                    f"the checkpoint mixes two models: {first[True]} is named as in a model with "
                    f"a vision tower, {first[False]} as in one without."
                )
        yield name, tensor
