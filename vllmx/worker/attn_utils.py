# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/attn_utils.py @ v0.25.0
"""From the KV cache config to cache tensors, and from a batch to attention metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vllmx.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllmx.attention.selector import get_mamba_builder_cls
from vllmx.core.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
)
from vllmx.exceptions import UnsupportedError
from vllmx.layers.attention import Attention
from vllmx.layers.mamba_base import MambaBase
from vllmx.platform import torch_dtype
from vllmx.worker.input_batch import InputBatch

CacheLayer = Attention | MambaBase
"""A layer with a part of the cache."""


def init_kv_cache(
    kv_cache_config: KVCacheConfig, layers: Mapping[str, CacheLayer], device: str
) -> dict[str, Tensor]:
    """Allocate the cache and give each layer its view.

    Layers of several groups may share an allocation, and where blocks are packed all layers do. A
    layer that shares another's cache gets the other's view. Returns the pages of each recurrent
    layer, uint8 [num_blocks, bytes of its states].
    """
    specs = {
        name: group.kv_cache_spec
        for group in kv_cache_config.kv_cache_groups
        for name in group.layer_names
    }
    pages: dict[str, Tensor] = {}
    packed: Tensor | None = None
    for kv_cache_tensor in kv_cache_config.kv_cache_tensors:
        if kv_cache_tensor.block_stride:
            raw = packed = _zeros(kv_cache_tensor.size, device) if packed is None else packed
        else:
            raw = _zeros(kv_cache_tensor.size, device)
        for name in kv_cache_tensor.shared_by:
            layer, spec = layers[name], specs[name]
            if isinstance(layer, MambaBase):
                assert isinstance(spec, MambaSpec) and not kv_cache_tensor.block_stride
                whole = raw.view(kv_cache_config.num_blocks, -1)
                layer.bind_kv_cache(_states_of_pages(whole, spec))
                used = replace(spec, page_size_padded=None).page_size_bytes
                pages[name] = whole[:, :used]
                continue
            shape = layer.backend.get_kv_cache_shape(
                kv_cache_config.num_blocks, spec.block_size, layer.num_kv_heads, layer.head_size
            )
            layer.bind_kv_cache(_view_of_layer(raw, kv_cache_tensor, shape, layer))
    for name, target in shared_kv_cache_layers(layers).items():
        layers[name].bind_kv_cache(layers[target].kv_cache)  # type: ignore[arg-type]
    return pages


def state_groups(groups: list[KVCacheGroupSpec]) -> frozenset[int]:
    """Which groups hold recurrent states."""
    return frozenset(i for i, g in enumerate(groups) if isinstance(g.kv_cache_spec, MambaSpec))


def _states_of_pages(pages: Tensor, spec: MambaSpec) -> tuple[Tensor, ...]:
    """The states in `pages`, uint8 [num_blocks, page]: a tensor [num_blocks, *shape] each, which
    lie one after another in a page."""
    num_blocks, page = pages.shape
    states = []
    offset = 0
    for shape, name in zip(spec.shapes, spec.dtypes, strict=True):
        dtype = torch_dtype(name)
        assert page % dtype.itemsize == offset % dtype.itemsize == 0, (
            f"states {spec.shapes} of {spec.dtypes} do not lie at whole elements of a page"
        )
        stride = (page // dtype.itemsize, *torch.empty(shape, device="meta").stride())
        typed = pages.view(-1).view(dtype)
        states.append(typed.as_strided((num_blocks, *shape), stride, offset // dtype.itemsize))
        offset += math.prod(shape) * dtype.itemsize
    return tuple(states)


def _view_of_layer(
    raw: Tensor, kv_cache_tensor: KVCacheTensor, shape: tuple[int, ...], layer: Attention
) -> Tensor:
    """The pages of `layer` in the bytes of `raw`, as its backend wants them."""
    typed = raw.view(layer.kv_cache_dtype)
    itemsize = layer.kv_cache_dtype.itemsize
    stride = kv_cache_tensor.block_stride or kv_cache_tensor.size // shape[0]
    if stride == math.prod(shape[1:]) * itemsize:
        return typed.view(shape)
    if not layer.backend.indexes_kv_by_block_stride():
        raise UnsupportedError(
            f"Layer {layer.layer_name}: its KV blocks are {stride} bytes apart, which attention "
            f"backend {layer.backend.name} cannot read; choose another attention.backend."
        )
    inside = torch.empty(shape[1:], device="meta").stride()
    offset = kv_cache_tensor.offset
    assert stride % itemsize == offset % itemsize == 0
    return typed.as_strided(shape, (stride // itemsize, *inside), offset // itemsize)


def zero_blocks(layers: Iterable[Attention], block_ids: list[int], device: str) -> None:
    """Clear blocks that held recurrent states, whose bits may read as NaN. Backends never look at
    what was not written, but a kernel that loads whole blocks multiplies it by a mask of zeros."""
    index = torch.tensor(block_ids, pin_memory=device != "cpu").to(device, non_blocking=True)
    for layer in layers:
        layer.kv_cache.view(torch.uint8).index_fill_(0, index, 0)


def cache_layers(model: nn.Module) -> dict[str, CacheLayer]:
    """The layers of a model that have a part of the cache by name, in order."""
    return {m.layer_name: m for m in model.modules() if isinstance(m, CacheLayer)}


def shared_kv_cache_layers(layers: Mapping[str, CacheLayer]) -> dict[str, str]:
    """Layers without a cache of their own -> the earlier layer whose cache they read."""
    shared: dict[str, str] = {}
    seen: dict[str, Attention] = {}
    for name, layer in layers.items():
        if isinstance(layer, MambaBase):
            continue
        target = layer.kv_sharing_target_layer_name
        if target is None:
            seen[name] = layer
            continue
        assert target in seen, (
            f"layer {name} shares the KV cache of {target}, which is no earlier layer with a cache"
        )
        mine = (layer.num_kv_heads, layer.head_size, layer.sliding_window)
        other = seen[target]
        assert mine == (other.num_kv_heads, other.head_size, other.sliding_window), (
            f"layer {name} shares the KV cache of {target}, which is of another kind"
        )
        shared[name] = target
    return shared


def add_kv_sharing_layers_to_kv_cache_groups(
    shared_kv_cache_layers: dict[str, str],
    kv_cache_groups: list[KVCacheGroupSpec],
    runner_only_attn_layers: set[str] | None = None,
) -> None:
    """Put each layer that shares a cache into the group of its target, in place, so that it gets
    the group's metadata. `runner_only_attn_layers` takes their names: the scheduler does not know
    them."""
    groups = {name: group for group in kv_cache_groups for name in group.layer_names}
    for name, target in shared_kv_cache_layers.items():
        groups[target].layer_names.append(name)
        if runner_only_attn_layers is not None:
            runner_only_attn_layers.add(name)


def _zeros(nbytes: int, device: str) -> Tensor:
    if device == "cpu":
        # Untouched pages of numpy's zeros take no memory; torch.zeros would write them all.
        return torch.from_numpy(np.zeros(nbytes, dtype=np.uint8))
    return torch.zeros(nbytes, dtype=torch.uint8, device=device)


class AttnMetadataBuilders:
    """For each KV cache group, the builders of the backends its layers use."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, layers: Mapping[str, CacheLayer], device: str
    ) -> None:
        self.groups: list[list[tuple[AttentionMetadataBuilder, list[str]]]] = []
        for group in kv_cache_config.kv_cache_groups:
            by_backend: dict[Callable[..., Any], list[str]] = {}
            for name in group.layer_names:
                by_backend.setdefault(_builder_cls(layers[name]), []).append(name)
            self.groups.append(
                [
                    (builder(group.kv_cache_spec.block_size, torch.device(device)), names)
                    for builder, names in by_backend.items()
                ]
            )
        self._planning = [
            builder for group in self.groups for builder, _ in group if builder.plans_replays
        ]

    def plan_replay(self, num_reqs: int, seq_lens: np.ndarray) -> None:
        """Tell the builders that plan replays of the next one, see AttentionMetadataBuilder."""
        for builder in self._planning:
            builder.plan_replay(num_reqs, seq_lens)

    def build(
        self,
        batch: InputBatch,
        block_tables: list[Tensor],
        slot_mappings: list[Tensor],
        tiles: dict[int, Tensor] | None = None,
        captured: bool = False,
    ) -> dict[str, Any]:
        """Metadata by layer name for `batch`; `tiles`: for a graph of batches with prompts in
        them, see TritonAttentionMetadataBuilder; captured: for a graph of decodes."""
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
                has_initial_state=batch.has_initial_state,
                shares_new_blocks=batch.shares_new_blocks,
            )
            for builder, names in builders:
                if tiles is not None:
                    built = builder.build_for_mixed_graph(common, tiles)  # type: ignore[attr-defined]
                elif captured:
                    built = builder.build_for_cudagraph_capture(common)
                else:
                    built = builder.build(common)
                metadata.update(dict.fromkeys(names, built))
        return metadata


def _builder_cls(layer: CacheLayer) -> type[AttentionMetadataBuilder]:
    if isinstance(layer, MambaBase):
        return get_mamba_builder_cls(layer.mamba_type)
    return layer.backend.get_builder_cls()
