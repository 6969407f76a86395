# SPDX-License-Identifier: Apache-2.0
# upstream: csrc/fused_qknorm_rope_kernel.cu @ v0.25.0
"""Norms, rotation and cache write of an attention layer in one call, where a provider has it; in a
step that only decodes, with attention itself."""

from __future__ import annotations

from torch import Tensor

from vllmx.forward_context import get_forward_context
from vllmx.ir.op import REFERENCE
from vllmx.ir.select import OpTable
from vllmx.layers.attention import Attention
from vllmx.layers.layernorm import RMSNorm
from vllmx.layers.rotary_embedding import RotaryEmbedding

MAX_JOINED_REQS = 64
"""Most requests of a step that one kernel serves from the projection to attention's output. Above
it two are faster: on an H200 57 us a layer against 51 at 256 requests, 11 against 14 at 32."""


class FusedQKV:
    """From the projected queries, keys and values to the rotated queries; the rest is stored."""

    def __init__(
        self,
        attn: Attention,
        rotary_emb: RotaryEmbedding,
        ops: OpTable,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        self.attn = attn
        self.rotary_emb = rotary_emb
        self.norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        self._qk_norm_rope_cache = ops.bind("qk_norm_rope_cache", **_facts(attn, rotary_emb))
        self._decode = None
        plain = not attn.has_sinks and attn.attention_chunk_size is None
        if attn.backend.joins_decode() and plain:
            facts = {
                **_facts(attn, rotary_emb),
                "group": attn.num_heads // attn.num_kv_heads,
                "sliding_window": attn.sliding_window,
                "soft_cap": attn.logits_soft_cap,
            }
            impl = ops.choose("qk_norm_rope_decode", **facts)
            self._decode = None if impl.provider == REFERENCE else impl.fn

    @classmethod
    def of(
        cls,
        attn: Attention,
        rotary_emb: RotaryEmbedding,
        ops: OpTable,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> FusedQKV | None:
        """None where no provider has it all in one, or the layer has no cache of its own."""
        impl = ops.choose("qk_norm_rope_cache", **_facts(attn, rotary_emb))
        if impl.provider == REFERENCE or attn.kv_sharing_target_layer_name is not None:
            return None
        return cls(attn, rotary_emb, ops, q_norm, k_norm)

    def attend(self, positions: Tensor, qkv: Tensor) -> Tensor:
        """positions: [T]; qkv: [T, q_size + 2 * kv_size] -> what attention returns, [T, q_size]."""
        attn, norms = self.attn, self.norms
        metadata = get_forward_context().attn_metadata[attn.layer_name]
        joined = self._decode is not None and len(qkv) <= MAX_JOINED_REQS
        if not joined or not metadata.joins:
            return attn(self(positions, qkv), None, None)
        assert self._decode is not None
        return self._decode(
            qkv,
            None if norms is None else norms[0].weight,
            None if norms is None else norms[1].weight,
            0.0 if norms is None else norms[0].variance_epsilon,
            positions,
            self.rotary_emb.cos_sin_cache,
            attn.key_cache,
            attn.value_cache,
            metadata.slot_mapping,
            metadata.block_table,
            metadata.seq_lens,
            metadata.max_seq_len,
            attn.scale,
            attn.k_scale,
            attn.v_scale,
        )

    def __call__(self, positions: Tensor, qkv: Tensor) -> Tensor:
        """positions: [T]; qkv: [T, q_size + 2 * kv_size] -> queries [T, q_size]."""
        attn, norms = self.attn, self.norms
        return self._qk_norm_rope_cache(
            qkv,
            None if norms is None else norms[0].weight,
            None if norms is None else norms[1].weight,
            0.0 if norms is None else norms[0].variance_epsilon,
            positions,
            self.rotary_emb.cos_sin_cache,
            attn.key_cache,
            attn.value_cache,
            get_forward_context().attn_metadata[attn.layer_name].slot_mapping,
            self.rotary_emb.is_neox_style,
            attn.k_scale,
            attn.v_scale,
        )


def _facts(attn: Attention, rotary_emb: RotaryEmbedding) -> dict[str, object]:
    return {
        "head_size": attn.head_size,
        "rotary_dim": rotary_emb.rotary_dim,
        "is_neox_style": rotary_emb.is_neox_style,
        "kv_cache_dtype": attn.kv_cache_dtype,
    }
