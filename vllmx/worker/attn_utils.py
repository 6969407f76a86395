# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/attn_utils.py @ v0.25.0
"""From the KV cache config to cache tensors, and from a batch to attention metadata."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.layers.attention import Attention
from vllmx.worker.input_batch import InputBatch


def init_kv_cache(
    kv_cache_config: KVCacheConfig, layers: dict[str, Attention], device: str
) -> None:
    """Allocate the cache and give each layer its view; layers of several groups may share one."""
    block_sizes = {
        name: group.kv_cache_spec.block_size
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    for kv_cache_tensor in kv_cache_config.kv_cache_tensors:
        raw = _zeros(kv_cache_tensor.size, device)
        for name in kv_cache_tensor.shared_by:
            layer = layers[name]
            shape = layer.backend.get_kv_cache_shape(
                kv_cache_config.num_blocks,
                block_sizes[name],
                layer.num_kv_heads,
                layer.head_size,
            )
            layer.bind_kv_cache(raw.view(layer.kv_cache_dtype).view(shape))


def _zeros(nbytes: int, device: str) -> Tensor:
    if device == "cpu":
        # Untouched pages of numpy's zeros take no memory; torch.zeros would write them all.
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class AttnMetadataBuilders:
    """For each KV cache group, the builders of the backends its layers use."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, layers: dict[str, Attention], device: str
    ) -> None:
        self.groups: list[list[tuple[AttentionMetadataBuilder, list[str]]]] = []
        for group in kv_cache_config.kv_cache_groups:
            by_backend: dict[Callable[..., Any], list[str]] = {}
            for name in group.layer_names:
                by_backend.setdefault(layers[name].backend.get_builder_cls(), []).append(name)
            self.groups.append(
                [
                    (builder(group.kv_cache_spec.block_size, torch.device(device)), names)
                    for builder, names in by_backend.items()
                ]
            )

    def build(
        self, batch: InputBatch, block_tables: list[Tensor], slot_mappings: list[Tensor]
    ) -> dict[str, Any]:
        """Metadata by layer name for `batch`."""
        metadata: dict[str, Any] = {}
        for builders, table, slots in zip(self.groups, block_tables, slot_mappings, strict=True):
            common = CommonAttentionMetadata(
                query_start_loc=batch.query_start_loc,
                query_start_loc_np=batch.query_start_loc_np,
                seq_lens=batch.seq_lens,
                seq_lens_np=batch.seq_lens_np,
                num_reqs=batch.num_reqs,
                num_actual_tokens=batch.num_tokens,
                max_query_len=int(batch.num_scheduled_tokens[-1]),
                max_seq_len=int(batch.seq_lens_np.max()),
                block_table_tensor=table,
                slot_mapping=slots,
            )
            for builder, names in builders:
                metadata.update(dict.fromkeys(names, builder.build(common)))
        return metadata
