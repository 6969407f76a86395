# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/hunyuan_v1.py @ v0.25.0
"""HunYuan, MoE: HunYuan's attention, experts, and an MLP that all tokens take."""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.models.hf_config import HFConfig
from vllmx.models.hunyuan_v1 import HunYuanDecoderLayer, HunYuanDenseV1ForCausalLM, HunYuanModel
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper, layer_index


def hunyuan_moe(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """Experts; numbers of the config may be one for each layer."""
    layer = layer_index(prefix)

    def number(key: str, default: int) -> int:
        told = config.read(key, (int, list, type(None)), default)
        told = told[layer] if isinstance(told, list) else told
        return default if told is None else told

    top_k = number("moe_topk", 1)
    mixed = config.read("use_mixed_mlp_moe", (bool, int), True)
    return SharedExpertsMoE(
        config,
        number("num_experts", 1),
        top_k,
        number("moe_intermediate_size", config.intermediate_size),
        config.intermediate_size * number("num_shared_expert", 1) if mixed else 0,
        prefix=prefix,
        renormalize=top_k > 1,
        **shared,
    )


class HunYuanMoEDecoderLayer(HunYuanDecoderLayer):
    """HunYuan's layer with experts."""

    mlp_cls = staticmethod(hunyuan_moe)


class HunYuanMoEModel(HunYuanModel):
    """Embedding, layers, final norm."""

    layer_cls = HunYuanMoEDecoderLayer


class HunYuanMoEV1ForCausalLM(HunYuanDenseV1ForCausalLM):
    """HunYuan, MoE, with its output head."""

    hf_to_vllm_mapper = WeightsMapper(
        LLAMA_MAPPER.stacked,
        renamed={".mlp.gate.wg.": ".mlp.gate.", ".mlp.shared_mlp.": ".mlp.shared_experts."},
    )
    model_cls = HunYuanMoEModel
