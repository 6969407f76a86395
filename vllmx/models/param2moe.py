# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/param2moe.py @ v0.25.0
"""Param 2 MoE: Bailing's second generation, all of each head rotated.

Upstream takes the mean from a router's bias, which changes no choice, and rotates with a base of
10000 whatever rope_theta says: it is followed in neither.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from vllmx.exceptions import CheckpointError
from vllmx.models.bailing_moe import (
    BailingMoeDecoderLayer,
    BailingMoeForCausalLM,
    BailingMoeModel,
    bailing_mlp,
)
from vllmx.models.hf_config import HFConfig


def size_of_shared(config: HFConfig) -> int:
    """What the config names is the inner size of all shared experts together."""
    count = config.read("num_shared_experts", int)
    told = config.read("moe_shared_expert_intermediate_size", (int, type(None)), None)
    return (told or config.read("moe_intermediate_size", int) * count) if count else 0


class Param2MoEDecoderLayer(BailingMoeDecoderLayer):
    """Bailing's layer around experts of its own."""

    mlp_cls = staticmethod(partial(bailing_mlp, shared_size=size_of_shared))

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
