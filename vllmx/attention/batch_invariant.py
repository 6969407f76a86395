# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/batch_invariant.py @ v0.25.0
"""Attention whose result for a token depends on nothing but that token and the keys it sees.

`torch` and `native` attend to each token as if it were a request's only new one. `triton` does all
with its prefill kernel: its tiles of keys begin at multiples of their size wherever a chunk
begins, none is left unmasked, and none is split.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.attention.backends.native import NativeBackend, NativeMetadata
from vllmx.attention.backends.reference import ReferenceBackend
from vllmx.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionMetadata
from vllmx.ir.op import ANY_DEVICE
from vllmx.kernels.triton_attention import paged_prefill, processors_of, tokens_of_a_tile


def each_token_alone(common: CommonAttentionMetadata) -> CommonAttentionMetadata:
    """The same batch with every token as a request of its own, which has one new token."""
    starts, lengths = common.query_start_loc_np, common.seq_lens_np
    counts = np.diff(starts)
    if (counts == 1).all():
        return common
    request = np.repeat(np.arange(common.num_reqs), counts)
    place = np.arange(len(request)) - starts[request]
    seq_lens = (lengths[request] - counts[request] + place + 1).astype(np.int32)
    query_starts = np.arange(len(request) + 1, dtype=np.int32)
    table = common.block_table_tensor
    return replace(
        common,
        query_start_loc=torch.from_numpy(query_starts).to(table.device),
        query_start_loc_np=query_starts,
        seq_lens=torch.from_numpy(seq_lens).to(table.device),
        seq_lens_np=seq_lens,
        num_reqs=len(request),
        max_query_len=1,
        block_table_tensor=table.index_select(0, torch.from_numpy(request).to(table.device)),
    )


class TokenwiseReferenceBuilder(AttentionMetadataBuilder):
    """The batch, token by token."""

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """See AttentionMetadataBuilder.build."""
        return each_token_alone(common)


class TokenwiseReference(ReferenceBackend):
    """The definition, one token after another."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """TokenwiseReferenceBuilder."""
        return TokenwiseReferenceBuilder


class TokenwiseNativeBuilder(AttentionMetadataBuilder):
    """The batch, token by token, as the C kernel of decoding takes it."""

    def build(self, common: CommonAttentionMetadata) -> NativeMetadata:
        """See AttentionMetadataBuilder.build."""
        return NativeMetadata(each_token_alone(common), self.block_size)


class TokenwiseNative(NativeBackend):
    """The C kernel for every token."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """TokenwiseNativeBuilder."""
        return TokenwiseNativeBuilder


class PrefillTritonMetadata(TritonAttentionMetadata):
    """One step's batch, of which nothing is a decode."""

    def __init__(self, common: CommonAttentionMetadata, processors: int) -> None:
        super().__init__(common, processors)
        self.num_decodes = 0
        self.single = bool((self.query_lens == 1).all())

    def tiles(self, tokens: int) -> Tensor:
        """As TritonAttentionMetadata.tiles; those of single tokens stay, for a CUDA graph."""
        if self.single:
            return _single_tiles(self.num_reqs, self.seq_lens.device)
        return super().tiles(tokens)


@cache
def _single_tiles(number: int, device: torch.device) -> Tensor:
    """(request, 0) for `number` requests, int32 [number, 2]."""
    requests = torch.arange(number, dtype=torch.int32, device=device)
    return torch.stack((requests, torch.zeros_like(requests)), dim=1)


class PrefillTritonBuilder(AttentionMetadataBuilder):
    """Builds PrefillTritonMetadata."""

    def build(self, common: CommonAttentionMetadata) -> PrefillTritonMetadata:
        """See AttentionMetadataBuilder.build."""
        return PrefillTritonMetadata(common, processors_of(self.device))


class PrefillTriton(TritonAttentionBackend):
    """The prefill kernel for every token, with a mask on every tile."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """PrefillTritonBuilder."""
        return PrefillTritonBuilder

    @classmethod
    def supports_mixed_cudagraph(cls) -> bool:
        """A graph of any batch decodes some requests by another kernel than it prefills others."""
        return False

    @classmethod
    def joins_decode(cls) -> bool:
        """Decodes go the way of prefills."""
        return False

    @staticmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: TritonAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: Tensor | None = None,
        attention_chunk_size: int | None = None,
    ) -> Tensor:
        """See AttentionBackend.run."""
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        group = query.shape[1] // key_cache.shape[2]
        paged_prefill(
            query,
            key_cache,
            value_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.tiles(tokens_of_a_tile(group, query.dtype, query.shape[2])),
            out,
            scale * k_scale,
            sliding_window,
            soft_cap,
            v_scale,
            masks_all=True,
            sinks=sinks,
            attention_chunk_size=attention_chunk_size,
        )
        return out


VARIANTS: dict[str, tuple[type[AttentionBackend], tuple[str, ...]]] = {
    "torch": (TokenwiseReference, ANY_DEVICE),
    "native": (TokenwiseNative, ("cpu",)),
    "triton": (PrefillTriton, ("cuda",)),
}
"""By backend: the class that serves kernel.batch_invariant, and the devices on which it does."""
