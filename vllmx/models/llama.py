# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/models/llama.py @ v0.25.0
"""Llama: the dense decoder that most models are variations of. Read this one first.

Shapes: T tokens of the whole batch, H hidden size, V vocabulary. There is no batch dimension:
the tokens of all requests lie one after another, and only attention knows where each begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from vllmx.config import VllmConfig
from vllmx.exceptions import CheckpointError, WeightError
from vllmx.ir.select import OpTable
from vllmx.layers.activation import get_act_and_mul_fn
from vllmx.layers.attention import Attention
from vllmx.layers.fused_decoder import MAX_TOKENS, FusedDecoder
from vllmx.layers.fused_qkv import FusedQKV
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllmx.layers.logits_processor import LogitsProcessor
from vllmx.layers.rotary_embedding import RotaryEmbedding, get_rope
from vllmx.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllmx.models.hf_config import HFConfig
from vllmx.models.unbuilt import refuse_other_biases, refuse_unbuilt
from vllmx.models.utils import (
    LLAMA_MAPPER,
    AutoWeightsLoader,
    layer_index,
    make_layers,
    maybe_prefix,
    warn_of_own_head,
)


class LlamaMLP(nn.Module):
    """down(act(gate(x)) * up(x)); the config's inner size, unless another is given."""

    def __init__(
        self,
        config: HFConfig,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
        intermediate_size: int | None = None,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        inner = intermediate_size or config.read("intermediate_size", int)
        bias = config.read("mlp_bias", bool, False)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden, [inner, inner], bias, prefix=f"{prefix}.gate_up_proj", **shared
        )
        self.down_proj = RowParallelLinear(
            inner, hidden, bias, prefix=f"{prefix}.down_proj", **shared
        )
        self.hidden_act = self.activation_of(config)
        self.act_fn = get_act_and_mul_fn(self.hidden_act, ops)

    def activation_of(self, config: HFConfig) -> str:
        """The name of act in the config."""
        return config.read("hidden_act", str)

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, H]."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions; a family says below what it has else."""

    is_neox_style = True

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        layer, head_dim = layer_index(prefix), config.head_dim
        heads, kv_heads = self.heads_of(config, layer)
        self.q_size, self.kv_size = heads * head_dim, kv_heads * head_dim
        qkv_bias, o_bias = self.biases(config)
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            head_dim,
            heads,
            kv_heads,
            qkv_bias,
            prefix=f"{prefix}.qkv_proj",
            **shared,
        )
        self.o_proj = RowParallelLinear(
            self.q_size, config.hidden_size, o_bias, prefix=f"{prefix}.o_proj", **shared
        )
        max_model_len = vllm_config.model_config.max_model_len
        self.rotary_emb = self.rope_of(config, layer, max_model_len, ops)
        self.attn = Attention(
            heads,
            head_dim,
            self.scale_of(config),
            kv_heads,
            prefix=f"{prefix}.attn",
            logits_soft_cap=config.read("attn_logit_softcapping", float, None),
            **self.reach_of(config, layer),
            **shared,
        )
        self.fused_qkv = self.fused(ops)

    def heads_of(self, config: HFConfig, layer: int) -> tuple[int, int]:
        """How many heads this layer has: of queries, and of keys and values."""
        return config.num_attention_heads, config.num_key_value_heads

    def biases(self, config: HFConfig) -> tuple[bool, bool]:
        """Whether the projections to queries, keys and values have biases, and the one after."""
        bias = config.read("attention_bias", bool, False)
        return bias, bias

    def scale_of(self, config: HFConfig) -> float:
        """What scores are multiplied with."""
        return config.head_dim**-0.5

    def reach_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """What this layer's tokens see besides all before them: arguments of Attention."""
        sliding = config.layer_types[layer] == "sliding_attention"
        return {"per_layer_sliding_window": config.sliding_window if sliding else None}

    def rope_of(
        self, config: HFConfig, layer: int, max_model_len: int | None, ops: OpTable
    ) -> RotaryEmbedding | None:
        """The rotation of this layer; None where it has no positions."""
        return get_rope(
            config.head_dim,
            config.max_position_embeddings,
            self.rope_parameters_of(config, layer),
            ops,
            self.is_neox_style,
            max_model_len=max_model_len,
        )

    def rope_parameters_of(self, config: HFConfig, layer: int) -> dict[str, Any]:
        """What get_rope makes this layer's rotation of: rope_type, rope_theta and the rest."""
        rope = config.rope_parameters
        return rope.get(config.layer_types[layer], rope)  # some have one for each kind of layer

    def fused(self, ops: OpTable) -> FusedQKV | None:
        """What stands in for `prepare` and the cache write; None where nothing does."""
        if self.rotary_emb is None or type(self).prepare is not LlamaAttention.prepare:
            return None
        return FusedQKV.of(self.attn, self.rotary_emb, ops)

    def prepare(self, positions: Tensor, qk: Tensor) -> tuple[Tensor, Tensor]:
        """qk: [T, q_size + kv_size] -> the queries and keys that attention compares."""
        if self.rotary_emb is not None:
            # They are rotated as one tensor: to the rotation, heads are alike.
            qk, _ = self.rotary_emb(positions, qk)
        q, k = qk.split((self.q_size, self.kv_size), dim=-1)
        return q, k

    def forward(self, positions: Tensor, hidden_states: Tensor) -> Tensor:
        """positions: int64 [T]; hidden_states: [T, H] -> [T, H]."""
        qkv = self.qkv_proj(hidden_states)
        if self.fused_qkv is not None:
            return self.o_proj(self.fused_qkv.attend(positions, qkv))
        qk, v = qkv.split((self.q_size + self.kv_size, self.kv_size), dim=-1)
        q, k = self.prepare(positions, qk)
        return self.o_proj(self.attn(q, k, v))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each normed before, with the residual carried along."""

    attention_cls: Callable[..., nn.Module] = LlamaAttention
    mlp_cls: Callable[..., nn.Module] = LlamaMLP

    def __init__(
        self, config: HFConfig, *, vllm_config: VllmConfig, ops: OpTable, prefix: str
    ) -> None:
        super().__init__()
        shared: dict[str, Any] = {"vllm_config": vllm_config, "ops": ops}
        self.self_attn = self.attention_cls(config, prefix=f"{prefix}.self_attn", **shared)
        self.mlp = self.mlp_cls(config, prefix=f"{prefix}.mlp", **shared)
        self.input_layernorm = self.make_norm(config, ops)
        self.post_attention_layernorm = self.make_norm(config, ops)

    @staticmethod
    def make_norm(config: HFConfig, ops: OpTable) -> Any:
        """A norm of the hidden state, as the family has it."""
        return RMSNorm(config.hidden_size, config.rms_norm_eps, ops)

    def forward(
        self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns (output, residual), both [T, H]; their sum is what the next layer norms."""
        if residual is None:
            residual = hidden_states.clone()
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class LlamaModel(nn.Module):
    """Embedding, layers, final norm."""

    layer_cls: type[Any] = LlamaDecoderLayer

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.hidden_size, ops, f"{prefix}.embed_tokens"
        )
        self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: self.layer_cls(config, vllm_config=vllm_config, ops=ops, prefix=prefix),
            f"{prefix}.layers",
        )
        self.norm = self.layer_cls.make_norm(config, ops)
        self.config, self.ops = config, ops
        self.few_tokens: FusedDecoder | None = None

    def finish_loading(self) -> None:
        """Make the shorter way for small batches, where there is one."""
        if self._is_llamas():
            self.few_tokens = FusedDecoder.of(self.layers, self.ops)

    def _is_llamas(self) -> bool:
        """Whether each layer computes what Llama's does, but for attention."""
        return all(
            type(layer).forward is LlamaDecoderLayer.forward
            and type(layer.mlp) is LlamaMLP
            and type(layer.input_layernorm) is RMSNorm
            for layer in self.layers
        )

    def embed(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: int [T] -> what the first layer is given, [T, H]."""
        return self.embed_tokens(input_ids)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids, positions: int [T] -> hidden states [T, H]."""
        hidden_states, residual = self.embed(input_ids, positions), None
        if self.few_tokens is not None and len(positions) <= MAX_TOKENS:
            return self.norm(self.few_tokens(positions, hidden_states))
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual)
        if residual is None:
            return self.norm(hidden_states)
        hidden_states, _ = self.norm(hidden_states, residual)
        return hidden_states


class LlamaForCausalLM(nn.Module):
    """Llama with its output head."""

    hf_to_vllm_mapper = LLAMA_MAPPER
    model_cls: type[nn.Module] = LlamaModel  # a family that derives from this one has its own
    lm_head_bias = False
    layer_kinds: tuple[str, ...] = ("full_attention", "sliding_attention")
    model: Any

    def __init__(self, *, vllm_config: VllmConfig, ops: OpTable, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_text_config
        self.config = config
        refuse_unbuilt(config, self.layer_kinds)
        if self.lm_head_bias and config.tie_word_embeddings:
            raise CheckpointError(
                f"{config.origin}: tie_word_embeddings is true, which is not supported where the "
                "head has a bias; set it to false where the checkpoint has an lm_head.weight."
            )
        self.model = self.model_cls(
            vllm_config=vllm_config, ops=ops, prefix=maybe_prefix(prefix, "model")
        )
        refuse_other_biases(config, self.model)
        self.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            vllm_config=vllm_config,
            ops=ops,
            prefix=maybe_prefix(prefix, "lm_head"),
            bias=self.lm_head_bias,
        )
        self.logits_processor = LogitsProcessor(
            self.logit_scale(config),
            config.read("final_logit_softcapping", float, None),
            vllm_config.kernel_config.batch_invariant,
        )

    def logit_scale(self, config: HFConfig) -> float:
        """What logits are multiplied with."""
        return 1.0

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """input_ids: int [T], positions: int64 [T] -> hidden states [T, H]."""
        return self.model(input_ids, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [R, H] -> logits [R, V]."""
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Load a checkpoint's (name, tensor) pairs; CheckpointError where they don't fit."""
        tied = self.config.tie_word_embeddings
        if tied:
            weights = warn_of_own_head(weights, self.hf_to_vllm_mapper, self.config.origin)
        loader = AutoWeightsLoader(self, skip_prefixes=("lm_head.",) if tied else ())
        adapted = ((name, self._adapted(name, weight)) for name, weight in weights)
        loader.load_weights(adapted, self.hf_to_vllm_mapper)
        if tied:
            self.lm_head.tie_weights(self.model.embed_tokens)
        self.model.finish_loading()

    def _adapted(self, name: str, weight: Any) -> Any:
        try:
            return self.adapt(name, weight)
        except (IndexError, RuntimeError) as error:
            shape = list(weight.shape)
            raise WeightError(
                f"weight {name} has shape {shape}, which the config's heads don't divide.", name
            ) from error

    def adapt(self, name: str, weight: Any) -> Any:
        """A checkpoint's weight in our layout, where the family's is another."""
        return weight
