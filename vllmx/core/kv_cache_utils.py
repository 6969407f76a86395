# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/core/kv_cache_utils.py @ v0.25.0
"""From the layers' specs and the memory to the blocks, tensors and groups of the KV cache."""

from __future__ import annotations

import copy
import logging
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllmx.core.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    cdiv,
    max_model_len_of,
)
from vllmx.core.kv_cache_packing import (
    group_latent_specs,
    packed_block_bytes,
    packed_tensors,
    uses_packed_blocks,
)
from vllmx.core.mla_spec import MLAAttentionSpec, SlidingWindowMLASpec
from vllmx.exceptions import UnsupportedError, UserError

if TYPE_CHECKING:
    from vllmx.config import VllmConfig

logger = logging.getLogger(__name__)


def resolve_kv_cache_block_sizes(
    kv_cache_config: KVCacheConfig, vllm_config: VllmConfig
) -> tuple[int, int]:
    """(scheduler_block_size, hash_block_size) in tokens.

    The first is the step of prefix hits: the block size, or the groups' least common multiple.
    The second is the distance of two block hashes: `cache.hash_block_size`, else the groups'
    greatest common divisor; equal to the first where it brings nothing.
    """
    cache_config = vllm_config.cache_config
    assert cache_config.block_size is not None, "block_size is not resolved yet"
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if len(specs) <= 1:
        return cache_config.block_size, cache_config.block_size
    sizes = [spec.block_size for spec in specs]
    scheduler_block_size = math.lcm(*sizes)
    # States with blocks of their own size have none in common with attention.
    odd_mamba = any(
        isinstance(spec, MambaSpec) and spec.block_size != cache_config.block_size for spec in specs
    )
    if odd_mamba or not cache_config.enable_prefix_caching:
        return scheduler_block_size, scheduler_block_size
    hash_block_size = cache_config.hash_block_size or math.gcd(*sizes)
    if any(size % hash_block_size != 0 for size in sizes):
        raise UserError(
            f"Invalid hash_block_size={hash_block_size}: set cache.hash_block_size to a divisor "
            f"of all group block sizes {sizes}, or leave it unset."
        )
    return scheduler_block_size, hash_block_size


def max_memory_usage_bytes(vllm_config: VllmConfig, kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """Bytes that one request of `max_model_len` tokens takes in layers with these specs."""
    return sum(spec.max_memory_usage_bytes(vllm_config) for spec in kv_cache_specs)


def _longest_that_fits(
    vllm_config: VllmConfig, needed_bytes: Callable[[VllmConfig], int], available_memory: int
) -> int:
    """Largest max_model_len, up to the present one, that needs no more than is there; else 0."""
    probe = copy.copy(vllm_config)
    probe.model_config = copy.copy(vllm_config.model_config)

    def needed_for(max_model_len: int) -> int:
        probe.model_config.max_model_len = max_model_len
        return needed_bytes(probe)

    lengths = range(1, max_model_len_of(vllm_config) + 1)
    return bisect_right(lengths, available_memory, key=needed_for)


def estimate_max_model_len(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> int:
    """Longest request in tokens that fits in `available_memory` bytes, at most max_model_len."""
    specs = kv_cache_spec.values()
    return _longest_that_fits(
        vllm_config, lambda config: max_memory_usage_bytes(config, specs), available_memory
    )


def check_enough_kv_cache_memory(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec], available_memory: int
) -> None:
    """Raise UserError unless one request of max_model_len tokens fits in the memory (bytes)."""
    if kv_cache_spec:
        specs = kv_cache_spec.values()
        _check_enough_memory(
            vllm_config, lambda config: max_memory_usage_bytes(config, specs), available_memory
        )


def _check_enough_memory(
    vllm_config: VllmConfig, needed_bytes: Callable[[VllmConfig], int], available_memory: int
) -> None:
    if available_memory <= 0:
        raise UserError(f"No available memory for the cache blocks. {_more_memory(vllm_config)}")
    needed = needed_bytes(vllm_config)
    if needed <= available_memory:
        return
    max_model_len = max_model_len_of(vllm_config)
    longest = _longest_that_fits(vllm_config, needed_bytes, available_memory)
    if longest > 0:
        cure = (
            "Based on the available memory, the estimated maximum model length is "
            f"{longest}. Set model.max_model_len={longest} or less, or leave it unset to have it "
            f"fitted. {_more_memory(vllm_config)}"
        )
    else:
        cure = f"Not even one token fits. {_more_memory(vllm_config)}"
    raise UserError(
        "To serve at least one request with the model's max seq len "
        f"({max_model_len}), {_format_gib(needed)} GiB KV cache is needed, which is larger than "
        f"the available KV cache memory ({_format_gib(available_memory)} GiB). {cure}"
    )


def _more_memory(vllm_config: VllmConfig) -> str:
    """Which setting gives the cache more memory."""
    cache = vllm_config.cache_config
    if cache.num_gpu_blocks_override is not None:
        return f"Try increasing cache.num_gpu_blocks_override ({cache.num_gpu_blocks_override})."
    if cache.kv_cache_memory_bytes is not None:
        return f"Try increasing cache.kv_cache_memory_bytes ({cache.kv_cache_memory_bytes})."
    return (
        f"Try increasing cache.gpu_memory_utilization ({cache.gpu_memory_utilization:g}) or "
        "setting cache.kv_cache_memory_bytes."
    )


def _format_gib(num_bytes: int) -> str:
    gib = num_bytes / (1 << 30)
    # Small caches would all read 0.0.
    return f"{gib:.2f}" if gib >= 0.01 else f"{gib:.2g}"


def create_kv_cache_group_specs(
    kv_cache_spec: dict[str, KVCacheSpec], grouped_layer_names: list[list[str]]
) -> list[KVCacheGroupSpec]:
    """A group for each list of layers, whose specs must merge."""
    groups = []
    for layer_names in grouped_layer_names:
        specs = [kv_cache_spec[name] for name in layer_names]
        groups.append(KVCacheGroupSpec(layer_names, specs[0].merge(specs)))
    return groups


def is_kv_cache_spec_uniform(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether the specs of all layers merge into one. True for no layers."""
    specs = list(kv_cache_spec.values())
    return not specs or specs[0].can_merge(specs)


def is_kv_cache_type_attention_free(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether no layer has a KV cache."""
    return not kv_cache_spec


def is_kv_cache_page_size_uniform(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    """Whether the pages of all layers have the same number of bytes."""
    return len({spec.page_size_bytes for spec in kv_cache_spec.values()}) == 1


def get_uniform_page_size(kv_cache_specs: Iterable[KVCacheSpec]) -> int:
    """The one page size of the specs, in bytes."""
    (page_size,) = {spec.page_size_bytes for spec in kv_cache_specs}
    return page_size


def unify_kv_cache_spec_page_size(
    kv_cache_spec: dict[str, KVCacheSpec],
) -> dict[str, KVCacheSpec]:
    """The specs with pages as large as the largest, since a pool has blocks of one size.

    A page that divides the largest gets more tokens; another one is padded, if its backend reads
    padded pages, else UnsupportedError.
    """
    largest = max(spec.page_size_bytes for spec in kv_cache_spec.values())
    unified = {}
    for name, spec in kv_cache_spec.items():
        page_size = spec.page_size_bytes
        if largest % page_size == 0:
            spec = replace(spec, block_size=spec.block_size * (largest // page_size))
        elif isinstance(spec, AttentionSpec) and spec.indexes_kv_by_block_stride:
            spec = replace(spec, page_size_padded=largest)
        else:
            raise UnsupportedError(
                f"Layer {name}: its KV page of {page_size} bytes does not divide the largest page "
                f"of {largest} bytes, and its attention backend can't read padded pages "
                "(indexes_kv_by_block_stride). Choose another attention.backend."
            )
        assert spec.page_size_bytes == largest
        unified[name] = spec
    return unified


def _get_kv_cache_groups_uniform_page_size(
    kv_cache_spec: dict[str, KVCacheSpec],
) -> list[KVCacheGroupSpec]:
    """Groups of one size, each of layers with one spec.

    Layer i of every group uses tensor i, so groups of different sizes leave tensors unused. Most
    hybrids repeat a pattern of one layer of a kind and n of another: the smallest kind is then
    one group and the others are split into groups as large. If the largest kind is less than 1.5
    times the smallest, one group for each kind wastes less.
    """
    by_spec: dict[KVCacheSpec, list[str]] = defaultdict(list)
    for name, spec in kv_cache_spec.items():
        by_spec[spec].append(name)
    sizes = [len(names) for names in by_spec.values()]
    group_size = max(sizes) if max(sizes) < min(sizes) * 1.5 else min(sizes)
    grouped: list[list[str]] = []
    for names in by_spec.values():
        num_groups = cdiv(len(names), group_size)
        if num_padding := num_groups * group_size - len(names):
            logger.warning(
                "Add %d padding layers, may waste at most %.2f%% KV cache memory",
                num_padding,
                num_padding / len(names) * 100,
            )
        # Taking every n-th layer gives each pipeline stage a share of every group.
        grouped.extend(names[i::num_groups] for i in range(num_groups))
    return create_kv_cache_group_specs(kv_cache_spec, grouped)


def unify_hybrid_kv_cache_specs(kv_cache_spec: dict[str, KVCacheSpec]) -> None:
    """Make windowed and chunked layers keep the whole context, in place.

    For when the hybrid manager is off. UserError if that does not leave layers of one type.
    """
    if _is_one_type(kv_cache_spec):
        return
    logger.warning(
        "The hybrid KV cache manager is off: layers with a window keep the keys and values of the "
        "whole context, which takes more memory. Their computation is still windowed."
    )
    full = (s for s in kv_cache_spec.values() if isinstance(s, FullAttentionSpec))
    if (first := next(full, None)) is not None:
        full_block_size = first.block_size
        for name, spec in kv_cache_spec.items():
            if isinstance(spec, SlidingWindowMLASpec):
                kv_cache_spec[name] = _without_window(spec, full_block_size)
            elif isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
                kv_cache_spec[name] = FullAttentionSpec(**_fields_for(FullAttentionSpec, spec))
    if not _is_one_type(kv_cache_spec):
        raise UserError(
            "Hybrid KV cache manager is disabled but failed to convert the KV cache specs to one "
            "unified type: leave scheduler.disable_hybrid_kv_cache_manager unset for this model."
        )


def _fields_for(cls: type[KVCacheSpec], spec: KVCacheSpec) -> dict[str, Any]:
    """Those fields of `spec` that `cls` has too."""
    names = {field.name for field in fields(cls)}
    return {f.name: getattr(spec, f.name) for f in fields(spec) if f.name in names}


def _without_window(spec: SlidingWindowMLASpec, block_size: int) -> MLAAttentionSpec:
    """The spec of a latent layer that keeps everything, in blocks of those that do anyway."""
    kept = _fields_for(MLAAttentionSpec, spec)
    del kept["sliding_window"]
    if block_size != spec.block_size:
        kept |= {"block_size": block_size, "page_size_padded": None}
    return MLAAttentionSpec(**kept)


def _is_one_type(kv_cache_spec: dict[str, KVCacheSpec]) -> bool:
    return is_kv_cache_spec_uniform(kv_cache_spec) or UniformTypeKVCacheSpecs.is_uniform_type(
        kv_cache_spec
    )


def get_kv_cache_groups(
    vllm_config: VllmConfig, kv_cache_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """Put the layers into groups that share a block table; none for a model without a cache.

    Changes `kv_cache_spec` if `disable_hybrid_kv_cache_manager` is set.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        unify_hybrid_kv_cache_specs(kv_cache_spec)
    if is_kv_cache_type_attention_free(kv_cache_spec):
        return []
    if is_kv_cache_spec_uniform(kv_cache_spec):
        return create_kv_cache_group_specs(kv_cache_spec, [list(kv_cache_spec)])
    if uniform_spec := UniformTypeKVCacheSpecs.from_specs(kv_cache_spec):
        return [KVCacheGroupSpec(list(kv_cache_spec), uniform_spec)]
    if latent_groups := group_latent_specs(kv_cache_spec):
        return latent_groups
    return _get_kv_cache_groups_uniform_page_size(unify_kv_cache_spec_page_size(kv_cache_spec))


def _uniform_type_spec(groups: list[KVCacheGroupSpec]) -> UniformTypeKVCacheSpecs | None:
    """The spec of the only group if its layers have pages of different sizes."""
    spec = groups[0].kv_cache_spec
    return spec if len(groups) == 1 and isinstance(spec, UniformTypeKVCacheSpecs) else None


def _pool_bytes_per_block(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Bytes of one block over all tensors."""
    if (uniform_spec := _uniform_type_spec(groups)) is not None:
        return uniform_spec.page_size_bytes
    if uses_packed_blocks(vllm_config, groups):
        return packed_block_bytes(groups)
    group_size = max(len(group.layer_names) for group in groups)
    return group_size * get_uniform_page_size(group.kv_cache_spec for group in groups)


def _needed_bytes_of_groups(groups: list[KVCacheGroupSpec], vllm_config: VllmConfig) -> int:
    """Bytes of the blocks of one request of max_model_len tokens; padding layers count."""
    bytes_per_block = _pool_bytes_per_block(vllm_config, groups)
    return _num_blocks_of_longest(vllm_config, groups) * bytes_per_block


def _with_null_block(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec], memory: int) -> int:
    """`memory`, or what the longest request and the null block take if that is more.

    The null block holds no tokens, so a pool that just fits the longest request is one short: it
    would pass the check and then wait for ever for its last block.
    """
    needed = _needed_bytes_of_groups(groups, vllm_config)
    return max(memory, needed + _pool_bytes_per_block(vllm_config, groups))


def _num_blocks_of_longest(vllm_config: VllmConfig, groups: list[KVCacheGroupSpec]) -> int:
    """Blocks of one request of max_model_len tokens, over all groups."""
    specs = [group.kv_cache_spec for group in groups]
    return sum(cdiv(s.max_memory_usage_bytes(vllm_config), s.page_size_bytes) for s in specs)


def may_override_num_blocks(vllm_config: VllmConfig, num_blocks: int) -> int:
    """`cache.num_gpu_blocks_override` if it is set, else `num_blocks`."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    return num_blocks if override is None else override


def get_num_blocks(
    vllm_config: VllmConfig, num_layers: int, available_memory: int, page_size: int
) -> int:
    """Blocks of `num_layers` pages of `page_size` bytes in the memory, unless overridden."""
    num_blocks = max(available_memory // page_size // num_layers, 0)
    return may_override_num_blocks(vllm_config, num_blocks)


def _get_kv_cache_config_packed(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> tuple[int, list[KVCacheTensor]]:
    """Number of blocks and the parts of each, for pages of several sizes in one block."""
    num_blocks = get_num_blocks(
        vllm_config, 1, available_memory, packed_block_bytes(kv_cache_groups)
    )
    return num_blocks, packed_tensors(kv_cache_groups, num_blocks)


def get_kv_cache_config_from_groups(
    vllm_config: VllmConfig, kv_cache_groups: list[KVCacheGroupSpec], available_memory: int
) -> KVCacheConfig:
    """Cut `available_memory` bytes into blocks and say which layers share a tensor.

    Layers of one group have tensors of their own. Layer i of each group shares tensor i: groups
    use different blocks of it. Where blocks are packed, all tensors are parts of one.
    """
    if not kv_cache_groups:
        # The pool needs its null block.
        return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    bytes_per_block = _pool_bytes_per_block(vllm_config, kv_cache_groups)
    num_blocks = get_num_blocks(vllm_config, 1, available_memory, bytes_per_block)
    if (uniform_spec := _uniform_type_spec(kv_cache_groups)) is not None:
        tensors = [
            KVCacheTensor(
                size=uniform_spec.kv_cache_specs[name].page_size_bytes * num_blocks,
                shared_by=[name],
            )
            for name in kv_cache_groups[0].layer_names
        ]
    elif uses_packed_blocks(vllm_config, kv_cache_groups):
        num_blocks, tensors = _get_kv_cache_config_packed(
            vllm_config, kv_cache_groups, available_memory
        )
    else:
        group_size = max(len(group.layer_names) for group in kv_cache_groups)
        tensor_size = bytes_per_block // group_size * num_blocks
        tensors = [
            KVCacheTensor(
                size=tensor_size,
                shared_by=[g.layer_names[i] for g in kv_cache_groups if i < len(g.layer_names)],
            )
            for i in range(group_size)
        ]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=kv_cache_groups
    )


def generate_scheduler_kv_cache_config(kv_cache_configs: list[KVCacheConfig]) -> KVCacheConfig:
    """The scheduler's config: any worker's, with one spec for each group."""
    first = kv_cache_configs[0]
    assert all(config.num_blocks == first.num_blocks for config in kv_cache_configs)
    config = copy.deepcopy(first)
    for group in config.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            # They need the same slots, which is all that the scheduler asks.
            group.kv_cache_spec = next(iter(group.kv_cache_spec.kv_cache_specs.values()))
    return config


def get_max_concurrency_for_kv_cache_config(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> float:
    """How many requests of max_model_len tokens the pool holds."""
    blocks = _num_blocks_of_longest(vllm_config, kv_cache_config.kv_cache_groups)
    return kv_cache_config.num_blocks / blocks


def get_kv_cache_capacity(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[int, float]:
    """Tokens that the pool holds in requests of max_model_len tokens, and how many of those."""
    concurrency = get_max_concurrency_for_kv_cache_config(vllm_config, kv_cache_config)
    return int(concurrency * max_model_len_of(vllm_config)), concurrency


def _auto_fit_max_model_len(
    vllm_config: VllmConfig,
    groups_per_worker: list[list[KVCacheGroupSpec]],
    available_memory: list[int],
) -> None:
    """Lower `model_config.max_model_len` to the longest request that every worker can hold."""
    wanted = max_model_len_of(vllm_config)
    fitted = wanted
    for groups, memory in zip(groups_per_worker, available_memory, strict=True):
        if groups:
            needed = partial(_needed_bytes_of_groups, groups)
            longest = _longest_that_fits(vllm_config, needed, memory)
            fitted = min(fitted, longest)
    if fitted <= 0:
        raise UserError(
            "Cannot auto-fit max_model_len: not enough memory for the KV cache of a single token. "
            f"{_more_memory(vllm_config)}"
        )
    if fitted < wanted:
        vllm_config.model_config.max_model_len = fitted
        logger.warning(
            "max_model_len lowered from %d to %d to fit in the KV cache memory (%s GiB).",
            wanted,
            fitted,
            _format_gib(min(available_memory)),
        )


def _merge_workers(kv_cache_specs: list[dict[str, KVCacheSpec]]) -> dict[str, KVCacheSpec]:
    """The layers of all workers; those that several have must agree."""
    merged: dict[str, KVCacheSpec] = {}
    for worker_specs in kv_cache_specs:
        for name, spec in worker_specs.items():
            assert merged.setdefault(name, spec) == spec, (
                f"Layer {name} has different KV cache specs on different workers."
            )
    return merged


def _project_kv_cache_groups_to_worker(
    global_kv_cache_groups: list[KVCacheGroupSpec], worker_spec: dict[str, KVCacheSpec]
) -> list[KVCacheGroupSpec]:
    """The groups with the layers of one worker only; a group may become empty."""
    projected = []
    for group in global_kv_cache_groups:
        names = [name for name in group.layer_names if name in worker_spec]
        spec = group.kv_cache_spec
        if names and isinstance(spec, UniformTypeKVCacheSpecs):
            layer_specs = {name: spec.kv_cache_specs[name] for name in names}
            spec = replace(spec, kv_cache_specs=layer_specs)
        is_eagle_group = group.is_eagle_group and bool(names)
        projected.append(KVCacheGroupSpec(names, spec, is_eagle_group))
    return projected


def _planned_memory(
    vllm_config: VllmConfig,
    groups_per_worker: list[list[KVCacheGroupSpec]],
    available_memory: list[int],
) -> list[int]:
    """Bytes for the blocks of requests: what is there, or what the override asks for, less its
    null block."""
    override = vllm_config.cache_config.num_gpu_blocks_override
    if override is None:
        return available_memory
    planned = []
    for groups, memory in zip(groups_per_worker, available_memory, strict=True):
        if groups:
            bytes_per_block = _pool_bytes_per_block(vllm_config, groups)
            logger.info(
                "num_gpu_blocks_override=%d replaces %d blocks.",
                override,
                memory // bytes_per_block,
            )
            memory = (override - 1) * bytes_per_block
        planned.append(memory)
    return planned


def _equalize_num_blocks(kv_cache_configs: list[KVCacheConfig]) -> None:
    """Give every worker as many blocks as the smallest has, since block ids are common."""
    num_blocks = min(config.num_blocks for config in kv_cache_configs)
    for config in kv_cache_configs:
        for tensor in config.kv_cache_tensors:
            assert tensor.size % config.num_blocks == 0
            tensor.size = tensor.size // config.num_blocks * num_blocks
        config.num_blocks = num_blocks


def get_kv_cache_configs(
    vllm_config: VllmConfig,
    kv_cache_specs: list[dict[str, KVCacheSpec]],
    available_memory: list[int],
) -> list[KVCacheConfig]:
    """The KV cache config of each worker, from its layers' specs and its bytes of memory.

    Groups are made from all workers' layers. A max_model_len that the user did not pin is lowered
    to what fits; a pinned one that does not fit is a UserError that says what would.
    """
    groups = get_kv_cache_groups(vllm_config, _merge_workers(kv_cache_specs))
    groups_per_worker = [
        _project_kv_cache_groups_to_worker(groups, specs) for specs in kv_cache_specs
    ]
    memory_per_worker = _planned_memory(vllm_config, groups_per_worker, available_memory)
    if not vllm_config.model_config.max_model_len_pinned:
        _auto_fit_max_model_len(vllm_config, groups_per_worker, memory_per_worker)
    configs = []
    for worker_groups, memory in zip(groups_per_worker, memory_per_worker, strict=True):
        if worker_groups:
            needed = partial(_needed_bytes_of_groups, worker_groups)
            _check_enough_memory(vllm_config, needed, memory)
            memory = _with_null_block(vllm_config, worker_groups, memory)
        configs.append(get_kv_cache_config_from_groups(vllm_config, worker_groups, memory))
    _equalize_num_blocks(configs)
    for config in configs:
        if config.kv_cache_groups:
            num_tokens, concurrency = get_kv_cache_capacity(vllm_config, config)
            logger.info(
                "KV cache: %d tokens, %.2f requests of %d tokens.",
                num_tokens,
                concurrency,
                vllm_config.model_config.max_model_len,
            )
    return configs
