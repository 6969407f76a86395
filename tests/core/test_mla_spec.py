# SPDX-License-Identifier: Apache-2.0
"""Latent attention: page sizes, merging, groups of several page sizes, packed blocks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)
from vllmx.core.kv_cache_packing import _approximate_gcd, group_latent_specs
from vllmx.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_configs,
    get_kv_cache_groups,
    is_kv_cache_spec_uniform,
    unify_hybrid_kv_cache_specs,
)
from vllmx.core.mla_spec import MLAAttentionSpec, SlidingWindowMLASpec
from vllmx.exceptions import UserError


def latent(block_size: int = 16, head_size: int = 576, **kwargs: Any) -> MLAAttentionSpec:
    fields = {"num_kv_heads": 1, "dtype": "bfloat16"} | kwargs
    return MLAAttentionSpec(block_size=block_size, head_size=head_size, **fields)


def windowed(
    block_size: int = 16, sliding_window: int = 128, head_size: int = 576, **kwargs: Any
) -> SlidingWindowMLASpec:
    fields = {"num_kv_heads": 1, "dtype": "bfloat16"} | kwargs
    return SlidingWindowMLASpec(
        block_size=block_size, sliding_window=sliding_window, head_size=head_size, **fields
    )


V4 = {"dtype": "uint8", "cache_dtype_str": "fp8_ds_mla", "model_version": "deepseek_v4"}


@pytest.mark.parametrize(
    ("spec", "page_size", "rows"),
    [
        # One vector a token, not one key and one value.
        (latent(), 16 * 576 * 2, 16),
        (latent(cache_dtype_str="fp8_ds_mla", dtype="uint8"), 16 * 656, 16),
        (latent(256, 512, compress_ratio=4, **V4), 64 * 584, 64),
        (latent(256, 512, compress_ratio=128, alignment=576, **V4), 3 * 576, 2),
        (latent(256, 132, compress_ratio=4, dtype="uint8", alignment=576), 15 * 576, 64),
        (windowed(64, head_size=512), 64 * 512 * 2, 64),
        (windowed(64, head_size=512, alignment=576, **V4), 65 * 576, 64),
    ],
)
def test_page_sizes_are_upstreams(spec, page_size, rows):
    assert spec.page_size_bytes == page_size
    assert spec.storage_block_size == rows


def test_only_equal_layouts_merge():
    assert latent().merge([latent(), latent()]) == latent()
    for other in (
        latent(cache_dtype_str="fp8_ds_mla"),
        latent(compress_ratio=4),
        latent(head_size=512),
        FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16"),
        windowed(),
    ):
        for specs in ([latent(), other], [other, latent()]):
            assert not is_kv_cache_spec_uniform(dict(enumerate(specs)))
            with pytest.raises(AssertionError):
                specs[0].merge(specs)
    assert windowed().merge([windowed(), windowed()]) == windowed()
    with pytest.raises(AssertionError):
        windowed().merge([windowed(), windowed(sliding_window=64)])


def test_kinds_and_windows_in_events():
    mixed = UniformTypeKVCacheSpecs(16, {"a": latent(), "b": windowed()})
    assert get_kv_cache_spec_kind(latent()) is KVCacheSpecKind.MLA_ATTENTION
    assert get_kv_cache_spec_kind(windowed()) is KVCacheSpecKind.SLIDING_WINDOW_MLA
    assert get_kv_cache_spec_kind(mixed) is KVCacheSpecKind.UNKNOWN
    assert get_kv_cache_spec_sliding_window(windowed()) == 128


def test_latent_layers_of_several_head_sizes_are_one_group_of_plain_tensors():
    config = VllmConfig()
    config.model_config.max_model_len = 64
    specs = {"main": latent(), "indexer": latent(head_size=132, dtype="uint8")}
    block = 16 * (576 * 2 + 132)
    (result,) = get_kv_cache_configs(config, [specs], [100 * block])
    assert result.num_blocks == 100
    assert [(t.size, t.block_stride) for t in result.kv_cache_tensors] == [
        (100 * 16 * 576 * 2, 0),
        (100 * 16 * 132, 0),
    ]


# ---------------------------------------------------------------- several page sizes


def v4_specs(num_c4: int, num_c128: int, num_windowed: int, num_states: int = 0) -> dict[str, Any]:
    """The layers of a model like DeepSeek V4."""
    specs: dict[str, Any] = {}
    for i in range(num_c4):
        specs[f"c4.{i}"] = latent(256, 512, compress_ratio=4, alignment=576, **V4)
        specs[f"indexer.{i}"] = latent(256, 132, compress_ratio=4, dtype="uint8", alignment=576)
    for i in range(num_c128):
        specs[f"c128.{i}"] = latent(256, 512, compress_ratio=128, alignment=576, **V4)
    for i in range(num_windowed):
        specs[f"swa.{i}"] = windowed(64, 128, 512, alignment=576, **V4)
    for i in range(num_states):
        specs[f"state.{i}"] = windowed(4, 8, 1024)
    return specs


def test_windowed_layers_are_split_to_the_width_of_the_others():
    groups = group_latent_specs(v4_specs(3, 2, 7))
    assert [group.layer_names for group in groups] == [
        ["c4.0", "indexer.0", "c4.1", "indexer.1", "c4.2", "indexer.2", "c128.0", "c128.1"],
        ["swa.0", "swa.2", "swa.4", "swa.6"],
        ["swa.1", "swa.3", "swa.5"],
    ]
    # Pages of a window are as large as one of the pages without.
    sizes = set(groups[0].kv_cache_spec.get_page_sizes())
    for group in groups[1:]:
        assert set(group.kv_cache_spec.get_page_sizes()) <= sizes


def test_the_pool_is_packed_and_sized_by_whole_blocks():
    config = VllmConfig()
    config.model_config.max_model_len = 1024
    config.scheduler_config.max_num_batched_tokens = 256
    specs = v4_specs(3, 2, 7, 3)
    groups = get_kv_cache_groups(config, dict(specs))
    page = {
        name: group.kv_cache_spec.kv_cache_specs[name].page_size_bytes
        for group in groups
        for name in group.layer_names
    }
    (result,) = get_kv_cache_configs(config, [dict(specs)], [64 << 20])
    stride = result.kv_cache_tensors[0].block_stride
    assert result.num_blocks == (64 << 20) // stride
    assert {t.size for t in result.kv_cache_tensors} == {stride * result.num_blocks}
    assert {t.block_stride for t in result.kv_cache_tensors} == {stride}
    # The places fill a block without overlap, and each layer has one of its own size.
    end = 0
    for tensor in result.kv_cache_tensors:
        (size,) = {page[name] for name in tensor.shared_by}
        assert tensor.offset == end
        end += size
    assert end == stride
    assert sorted(name for t in result.kv_cache_tensors for name in t.shared_by) == sorted(specs)
    for tensor in result.kv_cache_tensors:
        of_group = [[n for n in tensor.shared_by if n in g.layer_names] for g in groups]
        assert all(len(names) <= 1 for names in of_group)
    scheduler_config = generate_scheduler_kv_cache_config([result])
    assert isinstance(scheduler_config.kv_cache_groups[0].kv_cache_spec, MLAAttentionSpec)


def test_a_page_that_fits_nowhere_and_a_stranger_are_refused():
    too_large = v4_specs(1, 1, 1) | {"w": windowed(64, 32, 4096)}
    with pytest.raises(UserError, match="Layer w: its KV page"):
        group_latent_specs(too_large)
    plain = FullAttentionSpec(block_size=256, num_kv_heads=1, head_size=64, dtype="bfloat16")
    with pytest.raises(UserError, match="Layer x: FullAttentionSpec cannot share"):
        group_latent_specs(v4_specs(1, 1, 1) | {"x": plain})
    with pytest.raises(UserError, match="without a window"):
        group_latent_specs({"w": windowed()})
    assert group_latent_specs({"a": latent()}) is None


def test_without_the_hybrid_manager_all_latent_layers_keep_everything():
    specs = v4_specs(1, 1, 2)
    unify_hybrid_kv_cache_specs(specs)
    assert all(type(spec) is MLAAttentionSpec for spec in specs.values())
    assert specs["swa.0"].block_size == 256
    assert specs["swa.0"].sliding_window is None
    assert specs["swa.0"].page_size_bytes == replace(specs["swa.0"]).page_size_bytes
    assert UniformTypeKVCacheSpecs.is_uniform_type(specs)


def test_packing_can_be_asked_for_by_a_connector():
    config = VllmConfig()
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    groups = [KVCacheGroupSpec(["a", "b"], full), KVCacheGroupSpec(["c"], replace(full))]
    from vllmx.core.kv_cache_utils import get_kv_cache_config_from_groups as from_groups

    size = full.page_size_bytes
    plain = from_groups(config, groups, 20 * size)
    assert [t.block_stride for t in plain.kv_cache_tensors] == [0, 0]
    config.kv_transfer_config = SimpleNamespace(
        kv_connector_extra_config={"enable_cross_layers_blocks": "True"}
    )
    packed = from_groups(config, groups, 20 * size)
    assert [(t.shared_by, t.offset, t.block_stride) for t in packed.kv_cache_tensors] == [
        (["a", "c"], 0, 2 * size),
        (["b"], size, 2 * size),
    ]
    assert packed.num_blocks == plain.num_blocks == 10


def test_the_width_that_pads_least_is_the_largest_such():
    assert _approximate_gcd([4, 8, 12]) == 4
    assert _approximate_gcd([3, 7], lower_bound=3) == 4
    assert _approximate_gcd([11, 21], lower_bound=11) == 11
    with pytest.raises(ValueError, match="non-empty"):
        _approximate_gcd([])
    with pytest.raises(ValueError, match="positive"):
        _approximate_gcd([1, 0])
