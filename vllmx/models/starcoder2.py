# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/transformers/causal.py @ v0.25.0
"""StarCoder 2: Llama's order without a gate, norms by mean and variance, maybe a window. Upstream
runs transformers' own."""

from __future__ import annotations

from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.utils import PLAIN_STACKED, WeightsMapper


class Starcoder2Model(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = LayerNormDecoderLayer


class Starcoder2ForCausalLM(LlamaForCausalLM):
    """StarCoder 2 with its (tied) output head."""

    hf_to_vllm_mapper = WeightsMapper(
        stacked=PLAIN_STACKED,
        renamed={".mlp.c_fc.": ".mlp.up_proj.", ".mlp.c_proj.": ".mlp.down_proj."},
    )
    model_cls = Starcoder2Model
