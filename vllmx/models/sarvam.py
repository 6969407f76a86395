# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/sarvam.py @ v0.25.0
"""Sarvam, MoE: Bailing's second generation.

Upstream takes the mean from a router's bias, which changes no choice, and is not followed in that.
"""

from __future__ import annotations

from vllmx.models.bailing_moe import BailingMoeForCausalLM


class SarvamMoEForCausalLM(BailingMoeForCausalLM):
    """Sarvam, MoE, with its output head."""
