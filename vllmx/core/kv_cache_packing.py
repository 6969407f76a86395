# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_utils.py @ v0.25.0
"""Pools whose blocks hold pages of several sizes, one behind the other.

Layers with latent attention of several kinds have pages that no common size fits. A block is then
one run of bytes with a place for each page, and all layers look at one allocation with a stride.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vllmx.core.kv_cache_interface import (
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
    cdiv,
)
from vllmx.core.mla_spec import MLAAttentionSpec, SlidingWindowMLASpec
from vllmx.exceptions import UserError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig


def uses_packed_blocks(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> bool:
    """Whether the groups' pages lie in one block: they have several sizes, or a KV connector
    asks for it (`enable_cross_layers_blocks`) to move a block in one piece."""
    if all(isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs) for group in groups):
        return True
    transfer = vllm_config.kv_transfer_config
    if transfer is None or len(groups) <= 1:
        return False
    asked = transfer.kv_connector_extra_config.get("enable_cross_layers_blocks", False)
    return str(asked).lower() == "true"


def layers_by_page_size(groups: list[KVCacheGroupSpec]) -> dict[int, list[list[str]]]:
    """Page size -> its places in a block -> the layers that use the place, at most one a group.

    Groups use different blocks, so layers of different groups can use one place.
    """
    places: dict[int, list[list[str]]] = defaultdict(list)
    for group in groups:
        used: dict[int, int] = defaultdict(int)
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            size = spec.page_size_bytes
            if used[size] == len(places[size]):
                places[size].append([])
            places[size][used[size]].append(name)
            used[size] += 1
    return places


def packed_block_bytes(groups: list[KVCacheGroupSpec]) -> int:
    """Bytes of a block with a place for every page."""
    return sum(size * len(places) for size, places in layers_by_page_size(groups).items())


def packed_tensors(groups: list[KVCacheGroupSpec], num_blocks: int) -> list[KVCacheTensor]:
    """One entry for each place in a block; all of them are views of one allocation."""
    stride = packed_block_bytes(groups)
    tensors: list[KVCacheTensor] = []
    offset = 0
    for size, places in layers_by_page_size(groups).items():
        for names in places:
            tensors.append(KVCacheTensor(stride * num_blocks, names, offset, stride))
            offset += size
    return tensors


def group_latent_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> list[KVCacheGroupSpec] | None:
    """Groups of a model with latent layers of which some have a window; None for other models.

    The layers without a window are one group. Those with one are grouped by block size and
    window, and split so that each group fills about as many places as the first.
    """
    if not any(isinstance(spec, SlidingWindowMLASpec) for spec in kv_cache_spec.values()):
        return None
    full: dict[str, KVCacheSpec] = {}
    windowed: dict[tuple[int, int], dict[str, KVCacheSpec]] = defaultdict(dict)
    for name, spec in kv_cache_spec.items():
        if isinstance(spec, SlidingWindowMLASpec):
            windowed[spec.block_size, spec.sliding_window][name] = spec
        elif isinstance(spec, MLAAttentionSpec):
            full[name] = spec
        else:
            raise UserError(
                f"Layer {name}: {type(spec).__name__} cannot share a KV cache with latent "
                "attention that has a window."
            )
    full_spec = UniformTypeKVCacheSpecs.from_specs(full) if full else None
    if full_spec is None:
        raise UserError(
            "The latent attention layers without a window must be there and have one block size."
        )
    kinds = [full_spec, *map(_uniform, windowed.values())]
    counts = [kind.get_num_layer_tuples() for kind in kinds]
    width = _approximate_gcd(counts, lower_bound=counts[0])
    page_sizes = full_spec.get_page_sizes()
    groups = [KVCacheGroupSpec(list(full), full_spec)]
    for kind in kinds[1:]:
        groups += _split_windowed(kind.kv_cache_specs, page_sizes, width)
    return groups


def _uniform(specs: dict[str, KVCacheSpec]) -> UniformTypeKVCacheSpecs:
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    assert uniform is not None, f"{list(specs)} do not keep the same tokens"
    return uniform


def _split_windowed(
    specs: dict[str, KVCacheSpec], page_sizes: list[int], width: int
) -> list[KVCacheGroupSpec]:
    """Groups of at most `width` layers of each page size; pages are padded to one of
    `page_sizes`."""
    padded: dict[str, KVCacheSpec] = {}
    names_by_size: dict[int, list[str]] = defaultdict(list)
    for name, spec in specs.items():
        assert isinstance(spec, SlidingWindowMLASpec)
        fitting = [size for size in page_sizes if size >= spec.page_size_bytes]
        if not fitting:
            raise UserError(
                f"Layer {name}: its KV page of {spec.page_size_bytes} bytes is larger than every "
                "page of a layer without a window; lower its block size."
            )
        size = min(fitting)
        if size > spec.page_size_bytes:
            spec = replace(spec, page_size_padded=size, alignment=None)
        padded[name] = spec
        names_by_size[size].append(name)
    counts = {len(names) for names in names_by_size.values()}
    assert len(counts) == 1, f"layers of {sorted(names_by_size)} bytes a page: {sorted(counts)}"
    tuples = list(zip(*names_by_size.values(), strict=True))
    num_groups = cdiv(len(tuples), width)
    groups = []
    for i in range(num_groups):
        # Every n-th, so that each pipeline stage has a share of every group.
        names = [name for layers in tuples[i::num_groups] for name in layers]
        groups.append(KVCacheGroupSpec(names, _uniform({name: padded[name] for name in names})))
    return groups


def _approximate_gcd(values: Sequence[int], *, lower_bound: int | None = None) -> int:
    """The number, at least `lower_bound`, to whose multiples `values` are rounded up with the
    least added; the largest such number up to their maximum."""
    if not values:
        raise ValueError("values must be non-empty")
    if any(value <= 0 for value in values):
        raise ValueError(f"values must be positive, got: {list(values)!r}")
    lowest = max(1, lower_bound or 1)

    def added(divisor: int) -> tuple[int, int]:
        return sum(-value % divisor for value in values), -divisor

    return min(range(lowest, max(values) + 1), key=added, default=lowest)
