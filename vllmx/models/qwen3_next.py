# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/qwen3_next.py @ v0.25.0
"""Qwen3-Next: gated delta nets, and full attention with an output gate in every fourth layer.

Shapes: T tokens of the whole batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention
from vllmx.layers.fused_qk_norm_rope import FusedQKNormRopeGate
from vllmx.layers.gated_delta_net import QwenGatedDeltaNetAttention
from vllmx.layers.layernorm import GemmaRMSNorm
from vllmx.layers.linear import QKVParallelLinear, RowParallelLinear
from vllmx.layers.rotary_embedding import get_rope
from vllmx.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM
from vllmx.models.qwen2_moe import qwen_moe_mlp
from vllmx.models.utils import LLAMA_MAPPER, make_layers


class Qwen3NextAttention(nn.Module):
    """Grouped-query attention, normed queries and keys, part of each head rotated.

    With attn_output_gate the query projection holds a gate beside each query head, which
    multiplies the attention's output.
    """

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        self.head_dim = head_dim
        self.q_size, self.kv_size = heads * head_dim, kv_heads * head_dim
        self.attn_output_gate = config.read("attn_output_gate", bool, True)
        for key in ("attention_bias", "qkv_bias"):
            if config.read(key, bool, False):
                raise CheckpointError(f"{config.origin}: {key} is true, which is not supported.")
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads * (1 + self.attn_output_gate),
            kv_heads,
            prefix=f"{prefix}.qkv_proj",
            **shared,
        )
        self.o_proj = RowParallelLinear(
            self.q_size, config.hidden_size, prefix=f"{prefix}.o_proj", **shared
        )
        self.q_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, ops)
        self.k_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, ops)
        self.rotary_emb = get_rope(
            head_dim,
            config.max_position_embeddings,
            config.rope_parameters,
            ops,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        self.attn = Attention(
            heads, head_dim, head_dim**-0.5, kv_heads, prefix=f"{prefix}.attn", **shared
        )
        self._gate = ops.bind("mul_sigmoid")
        self.fused_gate = None
        if self.attn_output_gate:
            norms = (self.q_norm, self.k_norm)
            self.fused_gate = FusedQKNormRopeGate.of(*norms, self.rotary_emb, ops)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        qkv = self.qkv_proj(hidden_states)
        queries = qkv.shape[-1] - 2 * self.kv_size
        q, k, v = qkv.split((queries, self.kv_size, self.kv_size), dim=-1)
        gate: Tensor | None
        if self.fused_gate is not None and self.fused_gate.takes(positions):
            q, k, gate = self.fused_gate(positions, q, k)
        else:
            q, k, gate = self._separately(positions, q, k)
        out = self.attn(q, k, v)
        return self.o_proj(out if gate is None else self._gate(out, gate))

    def _separately(
        self, positions: Tensor, q: Tensor, k: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries and keys as attention takes them, and the gate that lay among the queries."""
        gate = None
        if self.attn_output_gate:
            q, gate = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
            q, gate = q.flatten(-2), gate.flatten(-2)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        return q, k, gate


class Qwen3NextDecoderLayer(nn.Module):
    """Gated delta net or attention, then MLP, each normed before, with the residual carried."""

    gqa_interleaved_layout = True

    def __init__(
        self,
        config: HFConfig,
        layer_idx: int,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.layer_type = config.layer_types[layer_idx]
        if self.layer_type == "linear_attention":
            self.linear_attn = QwenGatedDeltaNetAttention(
                config,
                prefix=f"{prefix}.linear_attn",
                gqa_interleaved_layout=self.gqa_interleaved_layout,
                **shared,
            )
        else:
            self.self_attn = Qwen3NextAttention(config, prefix=f"{prefix}.self_attn", **shared)
        self.mlp = self.make_mlp(config, layer_idx, prefix=f"{prefix}.mlp", **shared)
        norm = (config.hidden_size, config.rms_norm_eps, ops)
        self.input_layernorm = GemmaRMSNorm(*norm)
        self.post_attention_layernorm = GemmaRMSNorm(*norm)

    def make_mlp(self, config: HFConfig, layer_idx: int, **shared: Any) -> nn.Module:
        """Experts, or one MLP in layers that the config excepts from them."""
        return qwen_moe_mlp(config, **shared)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        if self.layer_type == "linear_attention":
            hidden_states = self.linear_attn(hidden_states)
        else:
            hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Qwen3NextModel(nn.Module):
    """Embedding, layers, final norm."""

    layer_cls: type[nn.Module] = Qwen3NextDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, ops, f"{prefix}.embed_tokens"
        )
        indices = iter(range(config.num_hidden_layers))
        self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: self.layer_cls(
                config, next(indices), vllm_config=vllm_config, ops=ops, prefix=prefix
            ),
            f"{prefix}.layers",
        )
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def finish_loading(self) -> None:
        """Nothing: no fused op takes a layer with a state."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: int [T] -> hidden states [T, H]."""
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Qwen3NextForCausalLM(LlamaForCausalLM):
    """Qwen3-Next with its output head; a head for drafting is left out."""

    hf_to_vllm_mapper = replace(LLAMA_MAPPER, skip_starts=("mtp.",))
    model_cls = Qwen3NextModel
    layer_kinds = ("linear_attention", "full_attention")
