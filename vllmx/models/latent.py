# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/deepseek_v2.py @ v0.25.0
"""Attention whose keys and values come of a latent of each token (MLA), computed as it is written.

The cache holds whole keys and values, as upstream's does with VLLM_MLA_DISABLE: many times what
the latents would take. A value is as long as a key there, with zeros behind it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from vllmx.layers.rotary_embedding import get_rope
from vllmx.models.hf_config import HFConfig
from vllmx.models.utils import LLAMA_MAPPER, WeightsMapper

LATENT_MAPPER = WeightsMapper(
    {part: LLAMA_MAPPER.stacked[part] for part in (".gate_proj.", ".up_proj.")}
)
"""The names of Llama's MLP; nothing else is stacked."""


class LatentAttention(nn.Module):
    """Multi-head attention; a part of each query and key is rotated, that of keys for all heads."""

    is_neox_style = False

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        if config.read("attention_bias", bool, False):
            raise CheckpointError(f"{config.origin}: attention_bias=True is not supported.")
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.nope = config.read("qk_nope_head_dim", int)
        self.rope = config.read("qk_rope_head_dim", int)
        self.value = config.read("v_head_dim", (int, type(None)), None) or hidden // heads
        self.num_heads, self.size = heads, self.nope + self.rope
        self.rank = config.read("kv_lora_rank", int)
        if self.value > self.size:
            raise CheckpointError(
                f"{config.origin}: v_head_dim is {self.value}; values longer than keys, of "
                f"{self.size}, are not supported."
            )
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.q_rank = config.read("q_lora_rank", (int, type(None)), None)
        if self.q_rank is None:
            self.q_proj = ColumnParallelLinear(
                hidden, heads * self.size, prefix=f"{prefix}.q_proj", **shared
            )
        else:
            self.q_a_proj = ReplicatedLinear(
                hidden, self.q_rank, prefix=f"{prefix}.q_a_proj", **shared
            )
            self.q_a_layernorm = RMSNorm(self.q_rank, config.rms_norm_eps, ops)
            self.q_b_proj = ColumnParallelLinear(
                self.q_rank, heads * self.size, prefix=f"{prefix}.q_b_proj", **shared
            )
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            hidden, self.rank + self.rope, prefix=f"{prefix}.kv_a_proj_with_mqa", **shared
        )
        self.kv_a_layernorm = RMSNorm(self.rank, config.rms_norm_eps, ops)
        self.kv_b_proj = ColumnParallelLinear(
            self.rank, heads * (self.nope + self.value), prefix=f"{prefix}.kv_b_proj", **shared
        )
        self.o_proj = RowParallelLinear(
            heads * self.value, hidden, prefix=f"{prefix}.o_proj", **shared
        )
        self.rotary_emb = get_rope(
            self.rope,
            config.max_position_embeddings,
            self.rope_parameters(config),
            ops,
            self.is_neox_style,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        self.attn = Attention(
            heads, self.size, self.scale_of(config), heads, prefix=f"{prefix}.attn", **shared
        )

    def rope_parameters(self, config: HFConfig) -> dict[str, Any]:
        """Those of the rotated part, all of which is rotated."""
        return {k: v for k, v in config.rope_parameters.items() if k != "partial_rotary_factor"}

    def scale_of(self, config: HFConfig) -> float:
        """What scores are multiplied with."""
        return self.size**-0.5

    def _queries(self, hidden_states: Tensor) -> Tensor:
        if self.q_rank is None:
            return self.q_proj(hidden_states)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        tokens, heads = len(positions), self.num_heads
        query = self._queries(hidden_states).view(tokens, heads, self.size)
        latent, key_rope = self.kv_a_proj_with_mqa(hidden_states).split(
            (self.rank, self.rope), dim=-1
        )
        both = self.kv_b_proj(self.kv_a_layernorm(latent.contiguous())).view(tokens, heads, -1)
        key_nope, value = both.split((self.nope, self.value), dim=-1)
        query_nope, query_rope = query.split((self.nope, self.rope), dim=-1)
        query_rope, key_rope = self.rotary_emb(
            positions, query_rope.flatten(1), key_rope.contiguous()
        )
        query = torch.cat((query_nope, query_rope.view(tokens, heads, -1)), dim=-1)
        key_rope = key_rope.unsqueeze(1).expand(-1, heads, -1)
        key = torch.cat((key_nope, key_rope), dim=-1)
        value = nn.functional.pad(value, (0, self.size - self.value))
        out = self.attn(query.flatten(1), key.flatten(1), value.flatten(1))
        return self.o_proj(out.view(tokens, heads, -1)[..., : self.value].flatten(1))


class ScaledLatentAttention(LatentAttention):
    """The same; beyond the original context scores grow as YaRN has it."""

    def scale_of(self, config: HFConfig) -> float:
        """By mscale_all_dim of the rope parameters, where they have it."""
        rope = config.rope_parameters
        weight, factor = rope.get("mscale_all_dim") or 0.0, rope.get("factor") or 1.0
        if rope["rope_type"] == "default" or factor <= 1:
            return super().scale_of(config)
        return super().scale_of(config) * (0.1 * weight * math.log(factor) + 1.0) ** 2
