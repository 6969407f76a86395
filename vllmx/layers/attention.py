# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/attention/attention.py @ v0.25.0
"""The attention layer: writes this step's keys and values to the cache and attends over it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vllmx.attention.backend import AttentionBackend
from vllmx.attention.selector import get_attn_backend
from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    get_kv_quant_mode,
)
from vllmx.forward_context import get_forward_context
from vllmx.ir.select import OpTable
from vllmx.platform import resolve_kv_cache_dtype


class Attention(nn.Module):
    """Multi-head, grouped-query or multi-query attention over the paged cache.

    `prefix` names the layer and its part of the cache. The runner sets `key_cache` and
    `value_cache`, [num_blocks, block_size, num_kv_heads, head_size]. A layer with
    `kv_sharing_target_layer_name` has no cache of its own: it reads what that layer, an earlier
    one of the same shape, has written in the same step. has_sinks: each head has a score beside
    those of its keys, which `set_sinks` tells. attention_chunk_size: sequences are cut every so
    many tokens, and a token sees its own piece alone. alibi_slopes: of each head, what the score
    of a key is less by for each token between it and the query.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        vllm_config: VllmConfig,
        ops: OpTable,
        prefix: str,
        per_layer_sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        kv_sharing_target_layer_name: str | None = None,
        has_sinks: bool = False,
        attention_chunk_size: int | None = None,
        alibi_slopes: list[float] | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.layer_name = prefix
        self.sliding_window = per_layer_sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        cache_dtype = vllm_config.cache_config.cache_dtype
        self.kv_cache_dtype = resolve_kv_cache_dtype(cache_dtype, ops.dtype)
        facts: dict[str, Any] = {
            "head_size": head_size,
            "sliding_window": per_layer_sliding_window,
            "soft_cap": logits_soft_cap,
            "kv_cache_dtype": self.kv_cache_dtype,
        }
        self.has_sinks = has_sinks
        if has_sinks:
            facts["sinks"] = True
        self.attention_chunk_size = attention_chunk_size
        if attention_chunk_size is not None:
            facts["attention_chunk_size"] = attention_chunk_size
        if alibi_slopes is not None:
            facts["alibi"] = True
        self.backend: type[AttentionBackend] = get_attn_backend(
            ops.choose_attention(vllm_config.attention_config.backend, **facts),
            ops.batch_invariant,
        )
        run: Callable[..., Tensor] = self.backend.run
        if attention_chunk_size is not None:
            run = partial(run, attention_chunk_size=attention_chunk_size)
        if alibi_slopes is not None:
            assert len(alibi_slopes) == num_heads, (prefix, alibi_slopes)
            run = partial(run, alibi_slopes=torch.tensor(alibi_slopes, device=ops.device))
        self._run = run
        if self.backend.indexes_kv_by_block_stride():
            # Its pages may be padded, or packed with those of other layers.
            facts["strided_blocks"] = True
        self._reshape_and_cache = ops.bind("reshape_and_cache", **facts)
        # What a checkpoint may say of a cache of one byte a number; see layers/kv_scales.py.
        self.k_scale = self.v_scale = 1.0
        self.kv_cache: Tensor
        self.key_cache: Tensor
        self.value_cache: Tensor

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        """Use `kv_cache`, of the backend's shape, from now on."""
        self.kv_cache = kv_cache
        self.key_cache, self.value_cache = kv_cache[:, :, 0], kv_cache[:, :, 1]

    def set_sinks(self, sinks: Tensor) -> None:
        """Use `sinks`, [num_heads], from now on; the layer must have been made with them."""
        assert self.has_sinks and sinks.shape == (self.num_heads,), (self.layer_name, sinks.shape)
        self._run = partial(self._run, sinks=sinks)

    def release_kv_cache(self) -> None:
        """Let go of the cache, until another is bound."""
        del self.kv_cache, self.key_cache, self.value_cache

    def forward(self, query: Tensor, key: Tensor | None, value: Tensor | None) -> Tensor:
        """query: [num_tokens, num_heads * head_size]; key, value: [num_tokens, kv size], None where
        they are in the cache by now, and not read by a layer that shares another's cache.

        Returns [num_tokens, num_heads * head_size].
        """
        metadata = get_forward_context().attn_metadata[self.layer_name]
        if key is not None and self.kv_sharing_target_layer_name is None:
            assert value is not None
            heads = (-1, self.num_kv_heads, self.head_size)
            self._reshape_and_cache(
                key.view(heads),
                value.view(heads),
                self.key_cache,
                self.value_cache,
                metadata.slot_mapping,
                self.k_scale,
                self.v_scale,
            )
        out = self._run(
            query.view(-1, self.num_heads, self.head_size),
            self.key_cache,
            self.value_cache,
            metadata,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            self.k_scale,
            self.v_scale,
        )
        return out.view(-1, self.num_heads * self.head_size)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """What this layer keeps for each token, and for how long."""
        block_size = vllm_config.cache_config.block_size
        assert block_size is not None
        dtype = str(self.kv_cache_dtype).removeprefix("torch.")
        common: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": dtype,
            "kv_quant_mode": get_kv_quant_mode(vllm_config.cache_config.cache_dtype),
            "indexes_kv_by_block_stride": self.backend.indexes_kv_by_block_stride(),
        }
        if (size := self.attention_chunk_size) is not None:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=size)
        if self.sliding_window is None:
            return FullAttentionSpec(**common)
        return SlidingWindowSpec(**common, sliding_window=self.sliding_window)


def attention_layers(model: nn.Module) -> dict[str, Attention]:
    """The attention layers of a model by name, in order."""
    return {m.layer_name: m for m in model.modules() if isinstance(m, Attention)}
