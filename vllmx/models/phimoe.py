# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/phimoe.py @ v0.25.0
"""Phi-3.5 MoE: Mixtral with norms by mean and variance, biases, and a router of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.models.dense import LayerNormDecoderLayer
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM, LlamaModel
from vllmx.models.mixtral import MixtralForCausalLM
from vllmx.models.sparse import SharedExpertsMoE

JITTER = 0.01
"""Half of how much less than the best a score may be, in parts of it, to share its weight."""


def sparsemixer(gating_output: Tensor) -> tuple[Tensor, Tensor]:
    """Two experts a token, one after the other: (weights, ids) of gating_output [T, E].

    An expert's weight is its share among those that are nearly as good as it, the first one being
    out of the running for the second: weights of a token do not add up to one.
    """
    scores = gating_output.float()

    def best_of(candidates: Tensor) -> tuple[Tensor, Tensor]:
        best, place = candidates.max(dim=-1, keepdim=True)
        far = (best - scores) / scores.abs().clamp(min=best) > 2 * JITTER
        shares = candidates.masked_fill(far, float("-inf")).softmax(dim=-1)
        return shares.gather(-1, place), place

    first, first_id = best_of(scores)
    second, second_id = best_of(scores.scatter(-1, first_id, float("-inf")))
    ids = torch.cat((first_id, second_id), dim=-1).to(torch.int32)
    return torch.cat((first, second), dim=-1), ids


def phi_moe(config: HFConfig, **shared: Any) -> nn.Module:
    """Experts of the router above; CheckpointError where the config wants another."""
    for key, served in (("num_experts_per_tok", 2), ("router_jitter_noise", JITTER)):
        if (told := config.read(key, float)) != served:
            raise CheckpointError(f"{config.origin}: {key} is {told:g}; {served} is served only.")
    return SharedExpertsMoE(
        config,
        config.read("num_local_experts", int),
        2,
        config.intermediate_size,
        custom_routing_function=sparsemixer,
        ckpt_names=("w1", "w2", "w3"),
        **shared,
    )


class PhiMoEDecoderLayer(LayerNormDecoderLayer):
    """Llama's order with experts."""

    mlp_cls = staticmethod(phi_moe)  # type: ignore[assignment]


class PhiMoEModel(LlamaModel):
    """Embedding, layers, final norm."""

    layer_cls = PhiMoEDecoderLayer


class PhiMoEForCausalLM(LlamaForCausalLM):
    """Phi-3.5 MoE with its output head."""

    hf_to_vllm_mapper = MixtralForCausalLM.hf_to_vllm_mapper
    model_cls = PhiMoEModel

    @property
    def lm_head_bias(self) -> bool:  # type: ignore[override]
        """As the config has it. Upstream, which leaves the bias out, is not followed in that."""
        return self.config.read("lm_head_bias", bool)
