# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/rnj1.py @ v0.25.0
"""Rnj-1: Gemma 3 without windows."""

from __future__ import annotations

from vllmx.models.gemma3 import Gemma3ForCausalLM


class Rnj1ForCausalLM(Gemma3ForCausalLM):
    """Rnj-1 with its (tied) output head; layers that see chunks are refused."""

    layer_kinds = ("full_attention",)
