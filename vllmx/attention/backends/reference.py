# SPDX-License-Identifier: Apache-2.0
"""Backend `torch`: the definition of the op `paged_attention`, one request after another."""

from __future__ import annotations

from torch import Tensor

from vllmx.attention.backend import (
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.ir.op import REFERENCE, OpContext
from vllmx.ir.ops.attention import paged_attention


class ReferenceMetadataBuilder(AttentionMetadataBuilder):
    """Passes the batch on as it is."""

    def build(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """See AttentionMetadataBuilder.build."""
        return common


class ReferenceBackend(AttentionBackend):
    """What the other backends are compared with; slow."""

    name = REFERENCE

    @staticmethod
    def refusal(context: OpContext) -> bool | str:
        """Takes everything."""
        return True

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """ReferenceMetadataBuilder."""
        return ReferenceMetadataBuilder

    @classmethod
    def indexes_kv_by_block_stride(cls) -> bool:
        """It looks blocks up by their number."""
        return True

    @staticmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: CommonAttentionMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        sinks: Tensor | None = None,
        attention_chunk_size: int | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend.run."""
        return paged_attention.fn(
            query,
            key_cache,
            value_cache,
            metadata.block_table_tensor,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale,
            sliding_window,
            soft_cap,
            k_scale,
            v_scale,
            sinks,
            attention_chunk_size,
            alibi_slopes,
        )
