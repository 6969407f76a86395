# SPDX-License-Identifier: Apache-2.0
"""Specs: bytes of a page, bytes of a request, what merges with what."""

from dataclasses import replace

import pytest
from kv_helpers import chunked, full, mamba, window

from vllmx.config import VllmConfig
from vllmx.core.kv_cache_interface import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpecKind,
    KVQuantMode,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    get_dtype_size,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
    get_kv_quant_mode,
)

LAYER = {"num_kv_heads": 2, "head_size": 64, "dtype": "float16"}


def config(max_model_len=100, max_num_batched_tokens=32, mamba_cache_mode="none"):
    vllm_config = VllmConfig()
    vllm_config.model_config.max_model_len = max_model_len
    vllm_config.scheduler_config.max_num_batched_tokens = max_num_batched_tokens
    vllm_config.cache_config.mamba_cache_mode = mamba_cache_mode
    return vllm_config


@pytest.mark.parametrize(
    ("spec", "num_bytes"),
    [
        (AttentionSpec(block_size=16, **LAYER), 2 * 16 * 2 * 64 * 2),
        (full(16, **LAYER), 16 * 2 * (64 + 64) * 2),
        (full(16, **(LAYER | {"dtype": "float32"})), 16 * 2 * (64 + 64) * 4),
        (full(16, head_size_v=32, **LAYER), 16 * 2 * (64 + 32) * 2),
        (full(16, page_size_padded=10000, **LAYER), 10000),
        (window(16, 8, **LAYER), 16 * 2 * (64 + 64) * 2),
        (window(16, 8, head_size_v=16, **LAYER), 16 * 2 * (64 + 16) * 2),
        (chunked(16, 8, **LAYER), 2 * 16 * 2 * 64 * 2),
        (mamba(16), (2 * 3) * 4 + 4 * 2),
        (replace(mamba(16), page_size_padded=64), 64),
    ],
)
def test_page_size_in_bytes(spec, num_bytes):
    assert spec.page_size_bytes == num_bytes


@pytest.mark.parametrize(
    ("mode", "num_bytes"),
    [
        # fp4 pairs and an fp8 scale for 16 elements; int4 pairs; float32 scales for K and V.
        ("nvfp4", 16 * 2 * 2 * (32 + 4)),
        ("int4_per_token_head", 16 * 2 * 2 * 32 + 2 * 16 * 2 * 4),
        ("int8_per_token_head", 16 * 2 * 2 * 64 + 2 * 16 * 2 * 4),
        ("fp8_per_token_head", 16 * 2 * 2 * 64 + 2 * 16 * 2 * 4),
        ("fp8_e4m3", 16 * 2 * 2 * 64),
    ],
)
def test_page_size_of_a_quantised_cache(mode, num_bytes):
    kv_quant_mode = get_kv_quant_mode(mode)
    layer = LAYER | {"dtype": "uint8", "kv_quant_mode": kv_quant_mode}
    assert full(16, **layer).page_size_bytes == num_bytes
    assert AttentionSpec(block_size=16, **layer).page_size_bytes == num_bytes


def test_quant_modes():
    assert get_kv_quant_mode("auto") is get_kv_quant_mode("bfloat16") is KVQuantMode.NONE
    assert get_kv_quant_mode("fp8") is KVQuantMode.FP8_PER_TENSOR
    assert KVQuantMode.NVFP4.is_nvfp4 and not KVQuantMode.NVFP4.is_per_token_head
    assert KVQuantMode.INT8_PER_TOKEN_HEAD.is_per_token_head


def test_padding_smaller_than_the_page_is_refused():
    with pytest.raises(AssertionError):
        _ = full(16, page_size_padded=10, **LAYER).page_size_bytes


def test_dtype_sizes_and_an_unknown_one():
    assert [get_dtype_size(d) for d in ("float32", "bfloat16", "float8_e4m3fn")] == [4, 2, 1]
    with pytest.raises(ValueError, match="Unknown KV cache dtype 'half'"):
        get_dtype_size("half")


def test_bytes_of_the_longest_request():
    page = 2 * 4 * 4  # keys and values, 4 tokens, float32
    assert full(4).max_memory_usage_bytes(config(99)) == 25 * page
    # Window 10: 9 tokens before the step's 32, and one block as it may begin within one.
    assert window(4, 10).max_memory_usage_bytes(config(99)) == (11 + 1) * page
    assert window(4, 10).max_memory_usage_bytes(config(20)) == (5 + 1) * page
    assert window(4, 10).max_memory_usage_bytes(config(20, None)) == (5 + 1) * page
    assert chunked(4, 10).max_memory_usage_bytes(config(99)) == 11 * page
    assert chunked(4, 10).max_memory_usage_bytes(config(20)) == 5 * page


@pytest.mark.parametrize(("mode", "num_states"), [("none", 1), ("align", 2), ("all", 25)])
def test_bytes_of_recurrent_states(mode, num_states):
    spec = mamba(4, num_speculative_blocks=3)
    expected = (num_states + 3) * spec.page_size_bytes
    assert spec.max_memory_usage_bytes(config(99, mamba_cache_mode=mode)) == expected


def test_full_attention_merges_one_window():
    merged = full(4).merge([full(4), full(4, sliding_window=7), full(4, non_causal=True)])
    assert merged == full(4, sliding_window=7, non_causal=True)
    with pytest.raises(ValueError, match="same window size"):
        full(4).merge([full(4, sliding_window=7), full(4, sliding_window=8)])
    with pytest.raises(AssertionError, match="sliding window layers and chunked"):
        full(4).merge([full(4, sliding_window=7), full(4, attention_chunk_size=8)])


@pytest.mark.parametrize(
    "other", [full(8), full(4, num_kv_heads=2), full(4, head_size_v=2), full(4, dtype="float16")]
)
def test_full_attention_of_other_layout_does_not_merge(other):
    assert not full(4).can_merge([full(4), other])
    with pytest.raises(AssertionError, match="same attention spec"):
        full(4).merge([full(4), other])


def test_other_specs_merge_with_their_equals_only():
    assert window(4, 7).merge([window(4, 7), window(4, 7)]) == window(4, 7)
    with pytest.raises(AssertionError, match="must be the same"):
        window(4, 7).merge([window(4, 7), window(4, 8)])
    with pytest.raises(AssertionError, match="must be FullAttentionSpec"):
        full(4).merge([full(4), window(4, 8)])


def test_uniform_type_is_about_token_slots_not_sizes():
    uniform = UniformTypeKVCacheSpecs.from_specs({"a": full(4), "b": full(4, num_kv_heads=3)})
    assert uniform is not None and uniform.block_size == 4
    assert uniform.page_size_bytes == 32 + 96
    assert uniform.max_memory_usage_bytes(config(99)) == 25 * 128
    for other in (full(8), window(4, 7), chunked(4, 8), mamba(4)):
        assert UniformTypeKVCacheSpecs.from_specs({"a": full(4), "b": other}) is None
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": window(4, 7), "b": window(4, 7)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": window(4, 7), "b": window(4, 8)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": chunked(4, 8), "b": chunked(4, 16)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type(
        {"a": mamba(4), "b": mamba(4, num_speculative_blocks=1)}
    )


def test_kind_and_window_for_events():
    specs = [full(4), window(4, 7), chunked(4, 8), mamba(4)]
    assert [get_kv_cache_spec_kind(spec) for spec in specs] == [
        KVCacheSpecKind.FULL_ATTENTION,
        KVCacheSpecKind.SLIDING_WINDOW,
        KVCacheSpecKind.CHUNKED_LOCAL_ATTENTION,
        KVCacheSpecKind.MAMBA,
    ]
    assert get_kv_cache_spec_kind(AttentionSpec(block_size=1, **LAYER)) == KVCacheSpecKind.UNKNOWN
    assert [get_kv_cache_spec_sliding_window(spec) for spec in specs] == [None, 7, None, None]
    same = UniformTypeKVCacheSpecs(4, {"a": window(4, 7), "b": window(4, 7, num_kv_heads=2)})
    assert get_kv_cache_spec_kind(same) == KVCacheSpecKind.SLIDING_WINDOW
    assert get_kv_cache_spec_sliding_window(same) == 7
    mixed = UniformTypeKVCacheSpecs(4, {"a": window(4, 7), "b": full(4)})
    assert get_kv_cache_spec_kind(mixed) == KVCacheSpecKind.UNKNOWN
    assert get_kv_cache_spec_sliding_window(mixed) is None


def test_pools_with_states_must_be_zeroed():
    attention = KVCacheConfig(1, [], [KVCacheGroupSpec(["a"], full(4))])
    hybrid = KVCacheConfig(
        1, [], [KVCacheGroupSpec(["a"], full(4)), KVCacheGroupSpec([], mamba(4))]
    )
    assert not attention.has_mamba_layers and not attention.needs_kv_cache_zeroing
    assert hybrid.has_mamba_layers and hybrid.needs_kv_cache_zeroing


def test_new_block_size_keeps_the_rest():
    spec = window(4, 7).copy_with_new_block_size(8)
    assert spec == window(8, 7) and spec.storage_block_size == 8
    assert isinstance(mamba(4).copy_with_new_block_size(8), MambaSpec)
