# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/cpu_attn.py @ v0.25.0
"""Backend `native`: decode by a C kernel that reads the paged cache in place.

Nothing is gathered or padded, so a step's cost follows the tokens it looks at. Requests with
several new tokens, where the matrix products of a whole chunk pay, go the way of `sdpa`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vllmx.attention.backend import (
    NO_CHUNKS,
    NO_SINKS,
    NO_SLOPES,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.attention.backends.torch_sdpa import Plan, SDPAMetadata, run_prefill
from vllmx.ir.op import OpContext
from vllmx.kernels.native_library import library
from vllmx.kernels.native_ops import native_on_cpu, slot_stride

MAX_HEAD_SIZE = 512
"""As in native.c."""


class NativeMetadata(SDPAMetadata):
    """One step's batch: the first `num_decodes` requests bring one new token each.

    The addresses are those of tensors that `common` keeps alive.
    """

    def __init__(self, common: CommonAttentionMetadata, block_size: int) -> None:
        super().__init__(common, block_size)
        query_lens = common.query_start_loc_np[1:] - common.query_start_loc_np[:-1]
        self.several = (query_lens > 1).nonzero()[0].tolist()
        self.num_decodes = self.several[0] if self.several else common.num_reqs
        # A single token behind a longer request is attended to as a prefill of one.
        self.several = list(range(self.num_decodes, common.num_reqs))
        self.block_table = common.block_table_tensor
        self.seq_lens = common.seq_lens
        self.longest = int(common.seq_lens_np[: self.num_decodes].max(initial=0))
        self.decode_arguments = (
            self.block_table.data_ptr(),
            self.block_table.stride(0),
            self.seq_lens.data_ptr(),
            self.longest,
            self.num_decodes,
        )

    def _make_plan(self, window: int | None) -> Plan:
        return Plan(prefills=[self._prefill(i, window) for i in self.several])


class NativeMetadataBuilder(AttentionMetadataBuilder):
    """Builds NativeMetadata."""

    def build(self, common: CommonAttentionMetadata) -> NativeMetadata:
        """Metadata whose prefill plans are made on demand."""
        return NativeMetadata(common, self.block_size)


class NativeBackend(AttentionBackend):
    """A C kernel for decode, torch's attention for prefill."""

    name = "native"

    @staticmethod
    def refusal(context: OpContext) -> bool | str:
        """float32 on a CPU with a C compiler, heads and a cache that the kernel can hold."""
        facts = context.facts
        if facts.get("sinks"):
            return NO_SINKS
        if facts.get("attention_chunk_size"):
            return NO_CHUNKS
        if facts.get("alibi"):
            return NO_SLOPES
        if facts.get("head_size", 0) > MAX_HEAD_SIZE:
            return f"holds heads of at most {MAX_HEAD_SIZE} elements, not {facts['head_size']}"
        if facts.get("kv_cache_dtype", torch.float32) != torch.float32:
            return f"reads a float32 cache only, not {facts['kv_cache_dtype']}"
        return native_on_cpu(context)

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """NativeMetadataBuilder."""
        return NativeMetadataBuilder

    @staticmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: NativeMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
    ) -> Tensor:
        """See AttentionBackend.run; the scales of a float32 cache are 1.0."""
        out = torch.empty(query.shape)
        if metadata.num_decodes:
            _decode(query, key_cache, value_cache, metadata, scale, sliding_window, soft_cap, out)
        if metadata.several:
            for request in metadata.plan(sliding_window).prefills:
                rows = slice(request.first, request.last)
                out[rows] = run_prefill(
                    query[rows], key_cache, value_cache, request, scale, soft_cap
                )
        return out


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    metadata: NativeMetadata,
    scale: float,
    sliding_window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    _, block_size, kv_heads, head_size = key_cache.shape
    library().native_paged_decode(
        query.data_ptr(),
        query.stride(0),
        key_cache.data_ptr(),
        slot_stride(key_cache),
        value_cache.data_ptr(),
        slot_stride(value_cache),
        *metadata.decode_arguments,
        kv_heads,
        query.shape[1] // kv_heads,
        head_size,
        block_size,
        sliding_window or 0,
        scale,
        soft_cap or 0.0,
        out.data_ptr(),
    )
