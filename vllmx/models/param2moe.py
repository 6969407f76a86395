# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/param2moe.py @ v0.25.0
"""Param 2 MoE: Bailing's second generation, all of each head rotated.

Upstream takes the mean from a router's bias, which changes no choice, and rotates with a base of
10000 whatever rope_theta says: it is followed in neither.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllmx.exceptions import CheckpointError
from vllmx.models.bailing_moe import (
    BailingMoeDecoderLayer,
    BailingMoeForCausalLM,
    BailingMoeModel,
    router_of,
)
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaMLP
from vllmx.models.sparse import SharedExpertsMoE
from vllmx.models.utils import layer_index


def param2_mlp(config: HFConfig, *, prefix: str, **shared: Any) -> nn.Module:
    """One MLP in the first first_k_dense_replace layers, then experts; the size of what all tokens
    take is that of all such experts together."""
    if layer_index(prefix) < config.read("first_k_dense_replace", int):
        return LlamaMLP(config, prefix=prefix, **shared)
    experts, inner = config.read("num_experts", int), config.read("moe_intermediate_size", int)
    count = config.read("num_shared_experts", int)
    told = config.read("moe_shared_expert_intermediate_size", (int, type(None)), None)
    return SharedExpertsMoE(
        config,
        experts,
        config.read("num_experts_per_tok", int),
        inner,
        (told or inner * count) if count else 0,
        prefix=prefix,
        **router_of(config, experts),
        **shared,
    )


class Param2MoEDecoderLayer(BailingMoeDecoderLayer):
    """Bailing's layer around experts of its own."""

    mlp_cls = staticmethod(param2_mlp)

    def __init__(self, config: HFConfig, **shared: Any) -> None:
        if config.rope_parameters.get("partial_rotary_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{config.origin}: partial_rotary_factor is "
                f"{config.rope_parameters['partial_rotary_factor']}; 1.0 is served only."
            )
        super().__init__(config, **shared)


class Param2MoEModel(BailingMoeModel):
    """Embedding, layers, final norm."""

    layer_cls = Param2MoEDecoderLayer


class Param2MoEForCausalLM(BailingMoeForCausalLM):
    """Param 2 MoE with its output head."""

    model_cls = Param2MoEModel
