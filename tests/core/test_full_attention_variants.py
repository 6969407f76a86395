# SPDX-License-Identifier: Apache-2.0
"""Output that is kept for a window only, and sink tokens that all requests see."""

from __future__ import annotations

from typing import Any

import pytest
from kv_helpers import HEAD, admit, full, make_kv_request, make_manager

from vllmx.core.full_attention_variants import RSWASpec, SinkFullAttentionSpec
from vllmx.core.kv_cache_interface import (
    KVCacheSpecKind,
    UniformTypeKVCacheSpecs,
    get_kv_cache_spec_kind,
)


def rswa(window: int, block_size: int = 4, **kwargs: Any) -> RSWASpec:
    return RSWASpec(block_size=block_size, rswa_window=window, **(HEAD | kwargs))


def sink(sink_len: int | None, block_size: int = 4) -> SinkFullAttentionSpec:
    return SinkFullAttentionSpec(block_size=block_size, sink_len=sink_len, **HEAD)


def decode(manager, request, num_tokens: int) -> None:
    for _ in range(num_tokens):
        request.append_output_token_ids(7)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1


def test_the_prompt_and_the_window_are_kept_and_the_gap_is_given_back():
    manager = make_manager([rswa(8)])
    request = make_kv_request("a", list(range(10)))
    admit(manager, request)
    decode(manager, request, 30)
    table = manager.coordinator.single_type_managers[0].req_to_blocks["a"]
    # Blocks 0 to 2 hold the prompt; of 40 tokens the last step saw those from 31 on.
    assert [i for i, block in enumerate(table) if block.is_null] == [3, 4, 5, 6]
    assert manager.block_pool.num_gpu_blocks - 1 - manager.block_pool.get_num_free_blocks() == 6
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1


@pytest.mark.parametrize(("window", "prompt"), [(1, 3), (4, 8), (6, 5), (8, 13)])
def test_every_step_holds_exactly_prompt_and_window(window, prompt):
    manager = make_manager([rswa(window)])
    request = make_kv_request("a", list(range(prompt)))
    admit(manager, request)
    table = manager.coordinator.single_type_managers[0].req_to_blocks["a"]
    for _ in range(40):
        request.append_output_token_ids(7)
        computed = request.num_computed_tokens
        manager.allocate_slots(request, 1)
        for i, block in enumerate(table):
            start, end = 4 * i, 4 * i + 4
            # A token at `computed` sees the prompt and what is less than `window` before it.
            seen = start < prompt or end > computed + 1 - window
            assert not (seen and block.is_null), (computed, i)
            gone = start >= prompt and end <= computed - window
            assert not gone or block.is_null, (computed, i)
        request.num_computed_tokens += 1


def test_only_the_prompt_can_be_hit():
    manager = make_manager([rswa(64)])
    request = make_kv_request("a", list(range(8)))
    admit(manager, request)
    decode(manager, request, 12)
    again = make_kv_request("b", [*range(8), *[7] * 12, 9])
    assert manager.get_computed_blocks(again)[1] == 8


def test_layers_of_one_window_are_one_kind():
    assert rswa(8).merge([rswa(8), rswa(8)]) == rswa(8)
    assert not rswa(8).can_merge([rswa(8), rswa(4)])
    assert not rswa(8).can_merge([rswa(8), full(4)])
    with pytest.raises(AssertionError, match="must share the same rswa_window"):
        rswa(8).merge([rswa(8), rswa(4)])
    assert UniformTypeKVCacheSpecs.is_uniform_type({"a": rswa(8), "b": rswa(8, num_kv_heads=2)})
    assert not UniformTypeKVCacheSpecs.is_uniform_type({"a": rswa(8), "b": full(4)})


def test_sink_blocks_are_out_of_the_pool_for_good():
    manager = make_manager([sink(8)], num_blocks=11)
    pool = manager.block_pool
    (single,) = manager.coordinator.single_type_managers
    assert [block.block_id for block in single.sink_blocks] == [1, 2]
    assert pool.get_num_free_blocks() == 8 and manager.usage == 0.0
    request = make_kv_request("a", list(range(16)))
    admit(manager, request)
    assert manager.usage == 0.5
    manager.free(request)
    assert manager.reset_prefix_cache()
    with pytest.raises(ValueError, match="Cannot reserve 9 free blocks"):
        pool.reserve_blocks(9)


def test_sink_spec_has_its_kind_and_needs_whole_blocks():
    assert get_kv_cache_spec_kind(sink(8)) is KVCacheSpecKind.SINK_FULL_ATTENTION
    assert sink(8).merge([sink(8), sink(8)]) == sink(8)
    for sink_len in (None, 0, 6):
        with pytest.raises(AssertionError, match="multiple of the block size 4"):
            make_manager([sink(sink_len)])
