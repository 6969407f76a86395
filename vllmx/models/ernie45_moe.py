# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/ernie45_moe.py @ v0.25.0
"""ERNIE 4.5, MoE: softmax scores with a bias for the choice, experts that all tokens share.

A head for drafting is left out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.models.ernie45 import Ernie4_5DecoderLayer, Ernie4_5ForCausalLM, Ernie4_5Model
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index


def ernie_moe_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts in every moe_layer_interval-th layer of those from the start index to the end's."""
    layer = layer_index(prefix)
    first, last = config.moe_layer_start_index, config.read("moe_layer_end_index", int, -1)
    if last == -1:
        last = config.num_hidden_layers - 1
    if not first <= layer <= last or (layer + 1) % config.moe_layer_interval:
        return LlamaMLP(config, prefix=prefix, **shared)
    inner = config.read("moe_intermediate_size", int)
    return SharedExpertsMoE(
        config,
        config.read("moe_num_experts", int),
        config.read("moe_k", int),
        inner,
        inner * (config.read("moe_num_shared_experts", (int, type(None))) or 0),
        prefix=prefix,
        correction_bias=True,
        **shared,
    )


class Ernie4_5_MoeDecoderLayer(Ernie4_5DecoderLayer):
    """ERNIE's layer with experts."""

    mlp_cls = staticmethod(ernie_moe_mlp)


class Ernie4_5_MoeModel(Ernie4_5Model):
    """Embedding, layers, final norm."""

    layer_cls = Ernie4_5_MoeDecoderLayer


class Ernie4_5_MoeForCausalLM(Ernie4_5ForCausalLM):
    """ERNIE 4.5, MoE, with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        skip_starts=("model.mtp_",),
        renamed={
            ".mlp.moe_statics.e_score_correction_bias": ".mlp.gate.e_score_correction_bias",
        },
    )
    model_cls = Ernie4_5_MoeModel

    def adapt(self, name: str, weight: Any) -> Any:
        """The bias for the choice is stored [1, E]."""
        row = name.endswith("e_score_correction_bias") and isinstance(weight, Tensor)
        return weight.flatten() if row and weight.dim() == 2 else weight
