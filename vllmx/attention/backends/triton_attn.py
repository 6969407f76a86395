# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/triton_attn.py @ v0.25.0
"""Backend `triton`: our own kernels that read the paged cache in place, for a GPU.

A batch is cut in two: the requests of one new token, which come first, are decoded with their
keys split over programs; the others are prefilled in tiles. Neither asks the device anything.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backend import (
    NO_SLOPES,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.ir.op import OpContext
from vllmx.kernels.triton_attention import (
    SUPPORTED,
    num_splits,
    paged_decode,
    paged_prefill,
    processors_of,
    tokens_of_a_tile,
)

MAX_HEAD_SIZE = 256
MAX_GROUP = 64
"""Query heads that may share a key head."""


class TritonAttentionMetadata:
    """One step's batch: the first `num_decodes` requests bring one new token each.

    tiles: by their new tokens, int32 [num_tiles, 2] on the device, the work of the other requests;
    decode_lens: seq_lens of the requests that are decoded, int32 [num_decodes]. joins: one kernel
    may store the new keys and attend to the old ones, as each request's old ones are of earlier
    steps.
    """

    def __init__(self, common: CommonAttentionMetadata, processors: int) -> None:
        self.slot_mapping = common.slot_mapping
        self.block_table = common.block_table_tensor
        self.query_start_loc = common.query_start_loc
        self.seq_lens = common.seq_lens
        self.max_seq_len = common.max_seq_len
        self.processors = processors
        self.query_lens = np.diff(common.query_start_loc_np)
        self.seq_lens_np = common.seq_lens_np
        several = np.flatnonzero(self.query_lens != 1)
        self.num_decodes = int(several[0]) if len(several) else common.num_reqs
        self.num_reqs = common.num_reqs
        self.decode_lens = self.seq_lens
        self.joins = self.num_decodes == self.num_reqs and not common.shares_new_blocks
        self._tiles: dict[int, Tensor] = {}

    def tiles(self, tokens: int) -> Tensor:
        """The tiles of `tokens` new tokens, made when first asked for."""
        tiles = self._tiles.get(tokens)
        if tiles is None:
            host = prefill_tiles(self.query_lens, self.seq_lens_np, self.num_decodes, tokens)
            tiles = torch.from_numpy(host)
            device = self.seq_lens.device
            if device.type != "cpu":
                tiles = tiles.pin_memory().to(device, non_blocking=True)
            self._tiles[tokens] = tiles
        return tiles


def prefill_tiles(
    query_lens: np.ndarray, seq_lens: np.ndarray, first: int, tokens: int
) -> np.ndarray:
    """(request, first new token) of each tile of `tokens` new tokens, int32 [num_tiles, 2].

    Covers the requests from `first` on; the tiles that see most keys come first, so that none of
    them is what the device waits for in the end.
    """
    counts = -(-query_lens[first:] // tokens)
    requests = np.repeat(np.arange(first, len(query_lens)), counts)
    number = np.arange(len(requests)) - np.repeat(np.cumsum(counts) - counts, counts)
    begins = number * tokens
    keys = seq_lens[requests] - query_lens[requests] + begins
    tiles = np.stack((requests, begins), axis=1).astype(np.int32)
    return tiles[np.argsort(-keys, kind="stable")]


class TritonAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Builds TritonAttentionMetadata."""

    def build(self, common: CommonAttentionMetadata) -> TritonAttentionMetadata:
        """See AttentionMetadataBuilder.build."""
        return TritonAttentionMetadata(common, processors_of(self.device))

    def build_for_mixed_graph(
        self, common: CommonAttentionMetadata, tiles: dict[int, Tensor]
    ) -> MixedGraphMetadata:
        """Metadata for a graph of batches with prompts in them; `tiles`: by tokens of a tile."""
        return MixedGraphMetadata(common, processors_of(self.device), tiles)


class MixedGraphMetadata(TritonAttentionMetadata):
    """Any batch of up to `num_reqs` requests, all that is told of it on the device: every request
    is decoded, which is nothing for those with several new tokens, and `tiles` are prefilled."""

    def __init__(
        self, common: CommonAttentionMetadata, processors: int, tiles: dict[int, Tensor]
    ) -> None:
        super().__init__(common, processors)
        self.num_decodes = common.num_reqs
        self.num_reqs = common.num_reqs + 1  # some are prefilled, too
        self.joins = False
        counts = self.query_start_loc.diff()
        self.decode_lens = torch.where(counts == 1, self.seq_lens, 0)
        self._tiles = tiles


class TritonAttentionBackend(AttentionBackend):
    """Triton kernels for decode and prefill."""

    name = "triton"

    @staticmethod
    def refusal(context: OpContext) -> bool | str:
        """A GPU, and heads that a program can hold."""
        if SUPPORTED is not True:
            return SUPPORTED
        if context.device != "cuda":
            return f"runs on a GPU, not on {context.device}"
        if context.facts.get("alibi"):
            return NO_SLOPES
        head_size = context.facts.get("head_size", 0)
        if head_size > MAX_HEAD_SIZE:
            return f"holds heads of at most {MAX_HEAD_SIZE} elements, not {head_size}"
        return True

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """TritonAttentionMetadataBuilder."""
        return TritonAttentionMetadataBuilder

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """Blocks are found by their stride."""
        return True

    @classmethod
    def joins_decode(cls) -> bool:
        """Its metadata has what `qk_norm_rope_decode` asks for."""
        return True

    @classmethod
    def supports_cudagraph(cls) -> bool:
        """A decode batch is read on the device alone."""
        return True

    @classmethod
    def supports_mixed_cudagraph(cls) -> bool:
        """So is any batch, but for its tiles, which lie in a tensor that stays in place."""
        return True

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
        num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        decodes = metadata.num_decodes
        how = (scale * k_scale, sliding_window, soft_cap, v_scale)
        if decodes:
            longest = metadata.max_seq_len
            if sliding_window is not None:
                longest = min(longest, sliding_window)
            if attention_chunk_size is not None:
                longest = min(longest, attention_chunk_size)
            paged_decode(
                query[:decodes],
                key_cache,
                value_cache,
                metadata.block_table,
                metadata.decode_lens,
                out,
                *how,
                splits=num_splits(decodes * num_kv_heads, longest, metadata.processors * 3 // 2),
                sinks=sinks,
                attention_chunk_size=attention_chunk_size,
            )
        if decodes < metadata.num_reqs:
            paged_prefill(
                query,
                key_cache,
                value_cache,
                metadata.block_table,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.tiles(
                    tokens_of_a_tile(num_heads // num_kv_heads, query.dtype, query.shape[2])
                ),
                out,
                *how,
                sinks=sinks,
                attention_chunk_size=attention_chunk_size,
            )
        return out
