# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/phi3.py @ v0.25.0
"""Phi-3 and Phi-4: Llama whose checkpoints stack queries, keys and values, and gate and up."""

from __future__ import annotations

from vllmx.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """Phi-3 with its output head: the linear layers take stacked matrices apart."""
