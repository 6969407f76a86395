# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/phi.py @ v0.25.0
"""Phi-1, 1.5 and 2: attention and MLP side by side, biases everywhere, heads partly rotated."""

from __future__ import annotations

from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.dense import ParallelDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class PhiAttention(LlamaAttention):
    """Llama's with biases; norms of queries and keys, which no checkpoint has, are refused."""

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        self.refuse(config)
        super().__init__(config, **shared)

    def refuse(self, config: HFConfig) -> None:
        """CheckpointError for what isn't built."""
        if config.read("qk_layernorm", bool, False):
            raise CheckpointError(f"{config.origin}: qk_layernorm is not supported in Phi.")

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Both."""
        return True, True


class PhiLayer(ParallelDecoderLayer):
    """Attention and MLP of one norm."""

    attention_cls = PhiAttention


class PhiModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = PhiLayer


class PhiForCausalLM(LlamaForCausalLM):
    """Phi with its output head, which has a bias."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={
            ".dense.": ".o_proj.",
            ".fc1.": ".up_proj.",
            ".fc2.": ".down_proj.",
            ".final_layernorm.": ".norm.",
        },
    )
    model_cls = PhiModel
    lm_head_bias = True
