# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/transformers/causal.py @ v0.25.0
"""GPTBigCode, SantaCoder and StarCoder: GPT-2 with one key head for all queries. Upstream runs
transformers' own."""

from __future__ import annotations

from typing import Any

from vllmx.models.gpt2 import GPT2LMHeadModel
from vllmx.models.utils import by_head


class GPTBigCodeForCausalLM(GPT2LMHeadModel):
    """GPTBigCode with its (tied) output head."""

    def adapt(self, name: str, weight: Any) -> Any:
        """Matrices are stored [out, in]; without the one key head, rows come head by head."""
        if ".c_attn." not in name or self.config.num_key_value_heads == 1:
            return weight
        return by_head(weight, 1, self.config.head_dim)
