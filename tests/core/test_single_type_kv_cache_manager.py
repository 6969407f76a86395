# SPDX-License-Identifier: Apache-2.0
"""Each kind of attention: what it keeps, what counts as a hit, what is worth caching."""

import itertools

import pytest
from kv_helpers import chunked, full, make_kv_request, make_manager, mamba, window

from vllmx.core.block_hash import make_block_hash_with_group_id
from vllmx.core.block_pool import BlockPool
from vllmx.core.kv_cache_coordinator import get_manager_for_kv_cache_spec
from vllmx.core.kv_cache_interface import AttentionSpec
from vllmx.core.mamba_manager import MambaManager
from vllmx.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    FullAttentionManager,
    SlidingWindowManager,
)


def make_one(spec, num_blocks=50, **kwargs):
    pool = BlockPool(num_blocks, enable_caching=True, hash_block_size=spec.block_size)
    settings = {"max_num_batched_tokens": 16, "max_model_len": 1000}
    settings |= {"kv_cache_group_id": 0, "scheduler_block_size": spec.block_size}
    return get_manager_for_kv_cache_spec(
        spec, block_pool=pool, enable_caching=True, **(settings | kwargs)
    )


def hit(manager, cached, eagle=False, max_blocks=None, alignment=None):
    """The hit where `cached[i]` says if block i is cached, as "." for null, "x" for a block."""
    pool = manager.block_pool
    hashes = [bytes([i]) for i in range(len(cached))]
    block_size = manager.block_size
    for block, (block_hash, is_cached) in enumerate(zip(hashes, cached, strict=True)):
        if is_cached:
            key = make_block_hash_with_group_id(block_hash, 0)
            pool.cached_block_hash_to_block.insert(key, pool.blocks[block + 1])
    (table,) = manager.find_longest_cache_hit(
        block_hashes=hashes,
        max_length=(max_blocks or len(cached)) * block_size,
        kv_cache_group_ids=[0],
        block_pool=pool,
        kv_cache_spec=manager.kv_cache_spec,
        drop_eagle_block=eagle,
        alignment_tokens=alignment or block_size,
    )
    for i, block in enumerate(table):
        assert block.is_null or block is pool.blocks[i + 1]
    return "".join("." if block.is_null else "x" for block in table)


def test_each_spec_has_its_manager_and_an_unknown_one_is_named():
    specs = [full(4), window(4, 8), chunked(4, 8), mamba(4)]
    assert [type(make_one(spec)) for spec in specs] == [
        FullAttentionManager,
        SlidingWindowManager,
        ChunkedLocalAttentionManager,
        MambaManager,
    ]
    with pytest.raises(ValueError, match="No manager for KV cache spec AttentionSpec"):
        make_one(AttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32"))


def test_full_attention_hits_up_to_the_first_gap():
    assert hit(make_one(full(4)), [1, 1, 0, 1]) == "xx"
    assert hit(make_one(full(4)), [0, 1, 1]) == ""
    assert hit(make_one(full(4)), [1, 1, 1], max_blocks=2) == "xx"
    assert hit(make_one(full(4)), [1, 1, 0, 1], eagle=True) == "x"
    assert hit(make_one(full(4)), [1, 1, 1, 0], alignment=8) == "xx"


# A window of 5 tokens attends to 4 before the next token: with blocks of 2 that is two blocks.
@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        ([], ""),
        ([1], "x"),
        ([0, 1], ""),
        ([1, 1], "xx"),
        ([1, 1, 0], "xx"),
        ([1, 1, 0, 1], "xx"),
        ([0, 1, 1, 0], ".xx"),
        ([1, 0, 1, 1, 0, 1], "..xx"),
        ([1, 1, 1, 1, 0, 0], "..xx"),
        ([0, 1, 0, 1, 0], ""),
    ],
)
def test_window_hits_where_cached_blocks_cover_it(cached, expected):
    assert hit(make_one(window(2, 5)), cached) == expected


def test_window_of_one_token_needs_no_earlier_block_yet_finds_one():
    assert hit(make_one(window(2, 1)), [0, 1, 0]) == ".x"


def test_window_hit_with_eagle_needs_one_more_and_drops_it():
    assert hit(make_one(window(2, 5)), [0, 1, 1, 1, 0], eagle=True) == ".xx"
    assert hit(make_one(window(2, 5)), [0, 1, 1, 0], eagle=True) == ""
    assert hit(make_one(window(2, 5)), [1, 1, 0], eagle=True) == "x"


def test_window_hit_ends_at_a_multiple_of_the_alignment():
    assert hit(make_one(window(2, 5)), [1] * 5, alignment=4) == "..xx"
    assert hit(make_one(window(2, 5)), [1, 1, 1, 0], alignment=4) == "xx"
    assert hit(make_one(window(2, 5)), [1, 0, 0], alignment=4) == ""


@pytest.mark.parametrize(
    ("cached", "expected"),
    [
        # 9 blocks of 2 tokens in chunks of 8: the next token is in the third chunk, block 8 on.
        ([0, 0, 0, 0, 0, 0, 0, 0, 1], "........x"),
        ([0, 0, 0, 0, 0, 0, 0, 0, 0], "........"),
        ([0, 0, 0, 0, 0, 0, 0, 0], "........"),
        ([0, 0, 0, 0, 1, 1, 0], "....xx"),
        ([1, 0, 1], "x"),
        ([], ""),
    ],
)
def test_chunk_hits_count_earlier_chunks_as_computed(cached, expected):
    assert hit(make_one(chunked(2, 8)), cached) == expected


def test_chunked_attention_has_no_eagle():
    with pytest.raises(AssertionError, match="eagle"):
        hit(make_one(chunked(2, 8)), [1], eagle=True)


def test_mamba_hits_the_last_cached_state():
    assert hit(make_one(mamba(4)), [1, 0, 1, 0]) == "..x"
    assert hit(make_one(mamba(4)), [0, 0]) == ""
    assert hit(make_one(mamba(4)), [1, 1, 1], alignment=8) == ".x"


@pytest.mark.parametrize(
    ("spec", "skipped"),
    [
        (full(4), [0, 0, 0, 0]),
        (window(4, 4), [0, 0, 4, 5]),
        (chunked(4, 8), [0, 0, 0, 8]),
        (mamba(4), [-1, 2, 6, 7]),
    ],
)
def test_tokens_that_the_next_one_does_not_attend_to(spec, skipped):
    assert [make_one(spec).get_num_skipped_tokens(n) for n in (0, 3, 7, 8)] == skipped


def test_removed_blocks_are_null_and_freed_tail_first():
    manager = make_one(window(2, 4))
    table = manager.req_to_blocks["a"]
    table += manager.block_pool.get_new_blocks(10)
    ids = [block.block_id for block in table]
    free = manager.block_pool.get_num_free_blocks()
    manager.remove_skipped_blocks("a", 4)
    assert not table[0].is_null  # one token is skipped, the block holds two
    manager.remove_skipped_blocks("a", 5)
    assert [block.is_null for block in table[:3]] == [True, False, False]
    manager.remove_skipped_blocks("a", 13)
    assert [block.is_null for block in table] == [True] * 5 + [False] * 5
    assert manager.block_pool.get_num_free_blocks() == free + 5
    queue = manager.block_pool.free_block_queue.get_all_free_blocks()
    assert [block.block_id for block in queue[:5]] == [*ids[4:0:-1], ids[0]]
    manager.remove_skipped_blocks("a", 1000)
    assert all(block.is_null for block in table)


def test_removing_for_a_request_without_blocks_does_nothing():
    manager = make_one(window(2, 4))
    manager.remove_skipped_blocks("unknown", 100)
    assert manager.block_pool.get_num_free_blocks() == 49


def test_blocks_to_allocate_count_hits_that_nobody_holds():
    manager = make_one(window(2, 4))
    pool = manager.block_pool
    held = pool.get_new_blocks(1)
    null = [pool.null_block]
    free = pool.blocks[-3:]
    ask = manager.get_num_blocks_to_allocate
    assert ask("a", 20, null * 2 + held * 3, 10, 20) == 10 - 5
    # A token past the hit leaves its first block out of the window.
    assert ask("a", 20, null * 3 + free[:2], 10, 20) == 5 + 2
    assert ask("a", 20, free, 6, 20) == 10 - 3 + 2
    assert ask("a", 4, [], 0, 4) == 2


def test_admission_cap_applies_only_when_asked_for():
    manager = make_one(window(2, 4), max_num_batched_tokens=5)
    cap = -(-(3 + 5) // 2) + 1
    ask = manager.get_num_blocks_to_allocate
    assert ask("a", 100, [], 0, 100, apply_admission_cap=True) == cap
    assert ask("a", 100, [], 0, 100) == 50
    assert (
        make_one(full(2)).get_num_blocks_to_allocate("a", 100, [], 0, 100, apply_admission_cap=True)
        == 50
    )


def test_a_running_request_may_hold_more_than_it_needs():
    manager = make_one(full(4))
    manager.allocate_new_blocks("a", 12, 12)
    manager.num_cached_block["a"] = 0
    assert manager.get_num_blocks_to_allocate("a", 5, [], 4, 5) == 0
    assert manager.allocate_new_blocks("a", 5, 5) == []


def test_common_prefix_is_what_all_requests_hold():
    manager = make_one(full(4))
    shared = manager.allocate_new_blocks("a", 8, 8)
    manager.allocate_new_blocks("a", 12, 12)
    assert manager.get_num_common_prefix_blocks("a") == 3
    manager.block_pool.touch(shared)
    manager.req_to_blocks["b"] += shared
    assert manager.get_num_common_prefix_blocks("a") == 2
    manager.allocate_new_blocks("c", 4, 4)
    assert manager.get_num_common_prefix_blocks("a") == 0
    assert make_one(window(4, 8)).get_num_common_prefix_blocks("a") == 0
    assert make_one(chunked(4, 8)).get_num_common_prefix_blocks("a") == 0
    assert make_one(mamba(4)).get_num_common_prefix_blocks("a") == 0


def test_freeing_an_unknown_request_does_nothing():
    manager = make_one(full(4))
    manager.free("never allocated")
    assert manager.block_pool.get_num_free_blocks() == 49


# ---------------------------------------------------------------- what is worth caching


def mask(spec, start, end, alignment, interval=None, prompt=None, eagle=False):
    manager_cls = type(make_one(spec))
    marks = manager_cls.reachable_block_mask(start, end, alignment, spec, eagle, interval, prompt)
    return None if marks is None else "".join("x" if mark else "." for mark in marks)


def test_dense_attention_caches_all():
    assert mask(full(2), 0, 8, 16, interval=0) is None
    assert mask(mamba(2), 0, 8, 16) is None
    assert mask(window(2, 5), 0, 8, None) is None


def test_window_caches_the_tail_before_each_place_where_hits_end():
    assert mask(window(2, 5), 0, 16, 16) == "......xx......xx"
    assert mask(window(2, 5), 5, 9, 16) == ".xx."
    assert mask(window(2, 5), 0, 16, 16, eagle=True) == "......xxx.....xx"
    assert mask(window(2, 5), 0, 8, 4) is None


def test_window_retention_keeps_fewer_tails_and_the_replay_of_the_prompt():
    assert mask(window(2, 5), 0, 16, 4, interval=16) == "......xx......xx"
    assert mask(window(2, 5), 0, 16, 4, interval=0) == "." * 16
    # 23 tokens: a repeat may hit 20 of the first 22, ten blocks.
    assert mask(window(2, 5), 0, 16, 4, interval=0, prompt=23) == "........xx......"
    assert mask(window(2, 5), 0, 16, 4, interval=16, prompt=23) == "......xxxx....xx"
    assert mask(window(2, 5), 9, 16, 4, interval=0, prompt=23) == "x......"


def test_mamba_retention_keeps_one_state_at_each_place():
    assert mask(mamba(2), 0, 8, 2, interval=8) == "...x...x"
    assert mask(mamba(2), 3, 8, 2, interval=8) == "x...x"
    assert mask(mamba(2), 0, 8, 2, interval=2) is None
    assert mask(mamba(2), 0, 8, 2, interval=0, prompt=11) == "....x..."
    assert mask(mamba(2), 0, 8, 4, interval=0, prompt=2) == "........"


# ---------------------------------------------------------------- recurrent states


def picture(manager, request_id):
    """A request's table in one group: "." for null, letters in the order of first sight."""
    names = itertools.count(ord("a"))
    seen = {}
    table = manager.coordinator.single_type_managers[0].req_to_blocks[request_id]
    for block in table:
        if not block.is_null and block.block_id not in seen:
            seen[block.block_id] = chr(next(names))
    return "".join("." if block.is_null else seen[block.block_id] for block in table)


def test_mamba_keeps_the_last_state_only():
    manager = make_manager([mamba(4)], num_blocks=10)
    request = make_kv_request("r", range(10))
    assert manager.allocate_slots(request, 10) is not None
    assert picture(manager, "r") == "abc"
    request.num_computed_tokens = 10
    request.append_output_token_ids(1)
    manager.allocate_slots(request, 1)
    assert picture(manager, "r") == "..a"
    assert manager.block_pool.get_num_free_blocks() == 8


def test_mamba_align_has_one_running_state_and_moves_its_speculative_blocks():
    manager = make_manager([mamba(4, "align", 2)], num_blocks=20, max_model_len=64)
    request = make_kv_request("r", range(18))
    manager.allocate_slots(request, 12)
    assert manager.get_block_ids("r") == ([0, 0, 1, 2, 3],)
    assert manager.block_pool.get_num_free_blocks() == 19 - 3
    request.num_computed_tokens = 12
    manager.allocate_slots(request, 6)
    # State 1 is copied from; 3 becomes the running state, 2 and a new one follow it.
    assert manager.get_block_ids("r") == ([0, 0, 1, 0, 3, 2, 4],)
    request.num_computed_tokens = 18
    request.append_output_token_ids([7] * 4)
    manager.allocate_slots(request, 4)
    assert manager.get_block_ids("r") == ([0, 0, 0, 0, 3, 2, 4, 5],)
    assert manager.block_pool.get_num_free_blocks() == 19 - 4
    manager.free(request)
    assert manager.block_pool.get_num_free_blocks() == 19


def test_state_computed_in_this_step_is_hit_in_the_next():
    manager = make_manager([full(4), mamba(4)], num_blocks=30)
    first = make_kv_request("a", range(8))
    manager.new_step_starts()
    manager.allocate_slots(first, 8)
    second = make_kv_request("b", [*range(8), 9])
    hits, num_hits = manager.get_computed_blocks(second)
    assert num_hits == 8
    assert manager.allocate_slots(second, 1, num_hits, hits) is None
    manager.new_step_starts()
    hits, num_hits = manager.get_computed_blocks(second)
    assert manager.allocate_slots(second, 1, num_hits, hits) is not None


def test_new_attention_blocks_are_reported_only_beside_states():
    hybrid = make_manager([full(4), mamba(4)], num_blocks=30)
    hybrid.allocate_slots(make_kv_request("a", range(8)), 8)
    attention = hybrid.get_block_ids("a")[0]
    assert hybrid.take_new_block_ids() == attention and hybrid.take_new_block_ids() == []
    plain = make_manager([full(4)], num_blocks=30)
    plain.allocate_slots(make_kv_request("a", range(8)), 8)
    assert plain.take_new_block_ids() == []
