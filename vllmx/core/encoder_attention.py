# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/kv_cache_interface.py, vllm/v1/core/single_type_kv_cache_manager.py @ v0.25.0
"""The KV cache of encoders: none for attention within one, a fixed part for attention to one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllmx.core.kv_cache_interface import AttentionSpec, KVCacheSpec, KVCacheSpecKind, cdiv
from vllmx.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig
    from vllmx.core.block_hash import BlockHashList
    from vllmx.core.block_pool import BlockPool
    from vllmx.core.kv_cache_block import KVCacheBlock
    from vllmx.request import Request


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention of an encoder to itself: it runs once over all positions and keeps nothing."""

    kind = KVCacheSpecKind.ENCODER_ONLY_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """0."""
        return 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """Attention of a decoder to an encoder's output: keys and values of its positions, written in
    the request's first step and read in all others."""

    kind = KVCacheSpecKind.CROSS_ATTENTION

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes of the longest encoder output that a step may compute."""
        num_tokens = vllm_config.scheduler_config.max_num_encoder_input_tokens
        return cdiv(num_tokens, self.block_size) * self.page_size_bytes


class CrossAttentionManager(SingleTypeKVCacheManager):
    """Blocks for an encoder's output, taken once, when the request is admitted.

    The token counts that it is given are encoder positions (`counts_encoder_tokens`): in the steps
    after the first there are none.
    """

    counts_encoder_tokens = True

    def __init__(self, kv_cache_spec: CrossAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        if self.enable_caching:
            raise UserError(
                "cache.enable_prefix_caching=true: what a decoder computes depends on its "
                "encoder's input, so prefixes can't be shared; set it to false."
            )

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Nothing: there are no prefix hits."""
        assert not new_computed_blocks, "a cross-attention group has no prefix hits"

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Nothing: entries of decoder tokens are not kept here."""

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = None
    ) -> None:
        """Refused: the blocks are the request's own."""
        raise ValueError("Cross-attention blocks are never shared between requests.")

    def unchanged_until(self, request_id: str, num_computed_tokens: int) -> int:
        """Without end: no later step takes or gives back a block."""
        return sys.maxsize

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """0: nothing is shared."""
        return 0

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Refused: see `cache_blocks`."""
        raise ValueError("Cross-attention blocks are never shared between requests.")
