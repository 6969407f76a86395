# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/gemma3.py @ v0.25.0
"""Gemma 3, text: sliding-window layers between full ones, normed queries and keys.

Shapes: T tokens of the whole batch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable
from vllmx.layers.activation import get_act_and_mul_fn
from vllmx.layers.attention import Attention
from vllmx.layers.fused_qkv import FusedQKV
from vllmx.layers.layernorm import GemmaRMSNorm
from vllmx.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllmx.layers.logits_processor import LogitsProcessor
from vllmx.layers.rotary_embedding import get_rope
from vllmx.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllmx.models.gemma import activation_of
from vllmx.models.hf_config import HFConfig
from vllmx.models.llama import LlamaForCausalLM
from vllmx.models.utils import make_layers


class Gemma3MLP(nn.Module):
    """down(gelu(gate(x)) * up(x))."""

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], prefix=f"{prefix}.gate_up_proj", **shared
        )
        self.down_proj = RowParallelLinear(inner, hidden, prefix=f"{prefix}.down_proj", **shared)
        self.act_fn = get_act_and_mul_fn(activation_of(config), ops)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class Gemma3Attention(nn.Module):
    """Grouped-query attention; each layer type has its own window and rotary base."""

    def __init__(
        self,
        config: HFConfig,
        layer_type: str,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
    ) -> None:
        super().__init__()
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        head_dim = config.head_dim
        self.head_dim = head_dim
        self.q_size, self.kv_size = heads * head_dim, kv_heads * head_dim
        bias = config.read("attention_bias", bool, False)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads,
            kv_heads,
            bias,
            prefix=f"{prefix}.qkv_proj",
            **shared,
        )
        self.o_proj = RowParallelLinear(
            self.q_size, config.hidden_size, bias, prefix=f"{prefix}.o_proj", **shared
        )
        self.q_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, ops)
        self.k_norm = GemmaRMSNorm(head_dim, config.rms_norm_eps, ops)
        rope = config.rope_parameters
        if layer_type not in rope:
            raise CheckpointError(f"{config.origin}: rope_parameters has no {layer_type!r}.")
        self.rotary_emb = get_rope(
            head_dim,
            config.max_position_embeddings,
            rope[layer_type],
            ops,
            max_model_len=vllm_config.model_config.max_model_len,
        )
        self.attn = Attention(
            heads,
            head_dim,
            config.query_pre_attn_scalar**-0.5,
            kv_heads,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=(
                config.sliding_window if layer_type == "sliding_attention" else None
            ),
            logits_soft_cap=config.attn_logit_softcapping,
            **shared,
        )
        self.fused_qkv = FusedQKV.of(self.attn, self.rotary_emb, ops, self.q_norm, self.k_norm)

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        qkv = self.qkv_proj(hidden_states)
        if self.fused_qkv is not None:
            return self.o_proj(self.fused_qkv.attend(positions, qkv))
        q, k, v = qkv.split((self.q_size, self.kv_size, self.kv_size), dim=-1)
        q = self.q_norm(q.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        k = self.k_norm(k.unflatten(-1, (-1, self.head_dim))).flatten(-2)
        q, k = self.rotary_emb(positions, q, k)
        return self.o_proj(self.attn(q, k, v))


class Gemma3DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and after."""

    def __init__(
        self,
        config: HFConfig,
        layer_type: str,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.self_attn = Gemma3Attention(config, layer_type, prefix=f"{prefix}.self_attn", **shared)
        self.mlp = Gemma3MLP(config, prefix=f"{prefix}.mlp", **shared)
        norm = (config.hidden_size, config.rms_norm_eps, ops)
        self.input_layernorm = GemmaRMSNorm(*norm)
        self.post_attention_layernorm = GemmaRMSNorm(*norm)
        self.pre_feedforward_layernorm = GemmaRMSNorm(*norm)
        self.post_feedforward_layernorm = GemmaRMSNorm(*norm)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states, residual = self.pre_feedforward_layernorm(hidden_states, residual)
        hidden_states = self.mlp(hidden_states)
        return self.post_feedforward_layernorm(hidden_states), residual


class Gemma3Model(nn.Module):
    """Scaled embedding, layers, final norm."""

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, ops, f"{prefix}.embed_tokens"
        )
        layer_types = iter(config.layer_types)
        self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: Gemma3DecoderLayer(
                config, next(layer_types), vllm_config=vllm_config, ops=ops, prefix=prefix
            ),
            f"{prefix}.layers",
        )
        self.norm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, ops)
        self.normalizer = config.hidden_size**0.5

    def finish_loading(self) -> None:
        """Nothing: these layers norm after their linear layers too, and no fused op does."""

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: int [T] -> hidden states [T, H]."""
        hidden_states, residual = self.embed_tokens(input_ids) * self.normalizer, None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class Gemma3ForCausalLM(LlamaForCausalLM):
    """Gemma 3 text model with its (tied) output head."""

    model_cls = Gemma3Model

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, ops=ops, prefix=prefix)
        self.logits_processor = LogitsProcessor(
            soft_cap=self.config.final_logit_softcapping,
            batch_invariant=vllm_config.kernel_config.batch_invariant,
        )
