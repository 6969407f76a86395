# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/mimo.py @ v0.25.0
"""MiMo: Qwen2, with layers for drafting behind the model's own, which are left out."""

from __future__ import annotations

from dataclasses import replace

from vllmx.models.qwen2 import Qwen2ForCausalLM
from vllmx.models.utils import LLAMA_MAPPER


class MiMoForCausalLM(Qwen2ForCausalLM):
    """MiMo with its output head."""

    hf_to_vllm_mapper = replace(LLAMA_MAPPER, skip_starts=("model.mtp_layers.",))
