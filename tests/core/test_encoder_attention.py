# SPDX-License-Identifier: Apache-2.0
"""The KV cache of encoders and of attention to them."""

import pytest
from engine_helpers import full_spec, make_config, make_request, make_scheduler

from vllmx.core.encoder_attention import CrossAttentionSpec, EncoderOnlyAttentionSpec
from vllmx.core.kv_cache_interface import KVCacheSpecKind, UniformTypeKVCacheSpecs
from vllmx.core.kv_cache_interface import get_kv_cache_spec_kind as kind_of
from vllmx.exceptions import UserError

SIZES = {"block_size": 4, "num_kv_heads": 1, "head_size": 2, "dtype": "float32"}


def manager():
    config = make_config(caching=False, num_blocks=16)
    return make_scheduler(config, [full_spec(4), CrossAttentionSpec(**SIZES)]).kv_cache_manager


def test_an_encoder_keeps_nothing_and_cross_attention_the_longest_output_of_a_step():
    config = make_config(max_num_batched_tokens=18)
    assert EncoderOnlyAttentionSpec(**SIZES).max_memory_usage_bytes(config) == 0
    cross = CrossAttentionSpec(**SIZES)
    assert cross.page_size_bytes == 4 * 2 * 2 * 4
    assert cross.max_memory_usage_bytes(config) == 5 * cross.page_size_bytes


def test_the_specs_have_labels_and_are_of_no_other_type():
    cross, own = CrossAttentionSpec(**SIZES), EncoderOnlyAttentionSpec(**SIZES)
    assert kind_of(cross) is KVCacheSpecKind.CROSS_ATTENTION
    assert kind_of(own) is KVCacheSpecKind.ENCODER_ONLY_ATTENTION
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": cross, "b": cross})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": full_spec(4), "b": cross})


def test_blocks_for_the_encoder_are_taken_in_the_first_step_alone():
    kv_cache_manager = manager()
    request = make_request("a", 6)
    new_blocks = kv_cache_manager.allocate_slots(request, 6, num_encoder_tokens=9)
    assert [len(blocks) for blocks in new_blocks.blocks] == [2, 3]
    request.num_computed_tokens = 6
    for token in range(5):
        request.append_output_token_ids(token)
        new_blocks = kv_cache_manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        assert len(new_blocks.blocks[1]) == 0
    assert [len(ids) for ids in kv_cache_manager.get_block_ids("a")] == [3, 3]
    # What a connector sees of the first 5 tokens: the encoder's part is not theirs to cut.
    ids = kv_cache_manager.get_block_ids_for_computed_tokens("a", 5)
    assert [len(group) for group in ids] == [2, 3]
    kv_cache_manager.free(request)
    assert kv_cache_manager.block_pool.get_num_free_blocks() == 15


def test_without_room_for_the_encoder_nothing_is_taken():
    kv_cache_manager = manager()
    request = make_request("a", 6)
    assert kv_cache_manager.allocate_slots(request, 6, num_encoder_tokens=55) is None
    assert kv_cache_manager.block_pool.get_num_free_blocks() == 15
    assert kv_cache_manager.allocate_slots(request, 6, num_encoder_tokens=52) is not None
    assert kv_cache_manager.block_pool.get_num_free_blocks() == 0


def test_prefix_caching_is_refused_with_cross_attention():
    with pytest.raises(UserError, match=r"cache\.enable_prefix_caching=true.*set it to false"):
        make_scheduler(make_config(), [full_spec(4), CrossAttentionSpec(**SIZES)])
