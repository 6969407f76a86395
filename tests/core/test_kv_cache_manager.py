# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view: hits, slots, admission, and the cases users have reported."""

from types import SimpleNamespace

import pytest
from kv_helpers import admit, chunked, full, make_kv_request, make_manager, mamba, window

from vllmx.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllmx.core.kv_cache_interface import KVCacheConfig
from vllmx.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllmx.exceptions import UserError
from vllmx.request import RequestStatus


def free_blocks(manager):
    return manager.block_pool.get_num_free_blocks()


def hit_length(manager, tokens, **kwargs):
    return manager.get_computed_blocks(make_kv_request("probe", tokens, **kwargs))[1]


# ---------------------------------------------------------------- KVCacheBlocks


def test_blocks_as_ids_for_each_group():
    a, b, c = (
        SimpleNamespace(block_id=i, block_hash=h, is_null=i == 0)
        for i, h in ((0, None), (1, None), (2, b"h"))
    )
    blocks = KVCacheBlocks(([a, b], [c]))
    assert blocks.get_block_ids() == ([0, 1], [2])
    assert blocks.get_unhashed_block_ids_all_groups() == [[1], []]
    assert KVCacheBlocks(([a, b, c],)).get_unhashed_block_ids() == [0, 1]
    assert (blocks + KVCacheBlocks(((), [b]))).get_block_ids() == ([0, 1], [2, 1])
    empty = blocks.new_empty()
    assert empty.get_block_ids() == ([], []) and empty.get_block_ids(allow_none=True) is None
    assert KVCacheBlocks(([], [c])).get_block_ids(allow_none=True) == ([], [2])


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize(
    ("length", "expected"), [(15, 0), (16, 0), (17, 16), (31, 16), (32, 16), (33, 32), (48, 32)]
)
def test_full_hit_leaves_the_last_token_to_compute(length, expected):
    """Reported: a prompt of whole blocks, all cached, left nothing to compute and crashed."""
    manager = make_manager([full(16)])
    tokens = list(range(length))
    admit(manager, make_kv_request("a", tokens, 16))
    again = make_kv_request("b", tokens, 16)
    assert admit(manager, again) == expected
    assert again.num_computed_tokens == length


def test_shared_prefix_shares_blocks_and_survives_the_first_request():
    manager = make_manager([full(4)])
    first = make_kv_request("a", [*range(8), 100, 101])
    second = make_kv_request("b", [*range(8), 200, 201])
    admit(manager, first)
    assert admit(manager, second) == 8
    a, b = manager.get_block_ids("a")[0], manager.get_block_ids("b")[0]
    assert a[:2] == b[:2] and a[2] != b[2]
    manager.free(first)
    manager.free(second)
    assert hit_length(manager, range(12)) == 8


def test_generated_tokens_are_hit_too():
    manager = make_manager([full(4)])
    request = make_kv_request("a", range(6))
    admit(manager, request)
    for token in range(6, 9):
        request.append_output_token_ids(token)
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    assert hit_length(manager, range(20)) == 8


def test_salt_isolates_tenants():
    """Reported: salts that equal another key, and hits across salts."""
    manager = make_manager([full(16)], num_blocks=64)
    tokens = list(range(64))
    lora = SimpleNamespace(lora_name="a")
    admit(manager, make_kv_request("1", tokens, 16, cache_salt="a"))
    assert hit_length(manager, tokens, hash_block_size=16, cache_salt="a") == 48
    assert hit_length(manager, tokens, hash_block_size=16, cache_salt="b") == 0
    assert hit_length(manager, tokens, hash_block_size=16) == 0
    assert hit_length(manager, tokens, hash_block_size=16, lora_request=lora) == 0


def test_prompt_logprobs_read_nothing_from_the_cache_but_still_fill_it():
    manager = make_manager([full(4)])
    tokens = list(range(12))
    admit(manager, make_kv_request("a", tokens))
    whole = make_kv_request("b", tokens, skip_reading_prefix_cache=True)
    assert manager.get_computed_blocks(whole) == (manager.empty_kv_cache_blocks, 0)
    other = list(range(50, 62))
    admit(manager, make_kv_request("c", other, skip_reading_prefix_cache=True))
    assert hit_length(manager, other) == 8


def test_caching_off_finds_and_stores_nothing():
    manager = make_manager([full(4)], enable_caching=False)
    assert isinstance(manager.coordinator, KVCacheCoordinatorNoPrefixCache)
    request = make_kv_request("a", range(12))
    admit(manager, request)
    manager.cache_blocks(request, 12)
    assert hit_length(manager, range(12)) == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0
    assert manager.get_num_common_prefix_blocks("a") == [0]


def test_hit_of_a_request_that_had_to_wait_is_looked_up_again():
    """Reported: a remembered hit was used after its blocks had been evicted."""
    manager = make_manager([full(4)], num_blocks=7)
    prefix = list(range(8))
    first = make_kv_request("a", prefix)
    admit(manager, first)
    manager.free(first)
    waiting = make_kv_request("w", [*prefix, 8])
    hits, num_hits = manager.get_computed_blocks(waiting)
    assert num_hits == 8
    big = make_kv_request("big", range(100, 124))
    admit(manager, big)
    assert manager.allocate_slots(waiting, 1, num_hits, hits) is None
    manager.free(big)
    assert manager.get_computed_blocks(waiting) == (manager.empty_kv_cache_blocks, 0)
    assert admit(manager, waiting) == 0


def test_hit_blocks_are_not_evicted_for_the_request_that_hit_them():
    manager = make_manager([full(4)], num_blocks=6)
    first = make_kv_request("a", range(16))
    admit(manager, first)
    manager.free(first)
    second = make_kv_request("b", [*range(12), 50, 51, 52, 53, 54])
    hits, num_hits = manager.get_computed_blocks(second)
    blocks = manager.allocate_slots(second, 5, num_hits, hits)
    assert num_hits == 12
    table = manager.get_block_ids("b")[0]
    assert len(set(table)) == 5 and table[:3] == hits.get_block_ids()[0]
    assert blocks.get_block_ids()[0] == table[3:]


def test_hits_in_the_free_queue_count_against_free_blocks():
    manager = make_manager([full(4)], num_blocks=6)
    first = make_kv_request("a", range(12))
    admit(manager, first)
    manager.free(first)
    other = make_kv_request("other", range(100, 104))
    admit(manager, other)
    # Four free, three of them hits: 12 hit tokens and 5 more need five blocks.
    second = make_kv_request("b", [*range(12), *range(60, 65)])
    hits, num_hits = manager.get_computed_blocks(second)
    assert (num_hits, free_blocks(manager)) == (12, 4)
    assert manager.allocate_slots(second, 5, num_hits, hits) is None
    assert free_blocks(manager) == 4 and manager.get_block_ids("b") == ([],)
    assert manager.allocate_slots(second, 4, num_hits, hits) is not None


# ---------------------------------------------------------------- statistics


def test_recomputation_after_preemption_is_counted_apart():
    """Reported: preempted requests hit their own blocks and raised the hit rate."""
    manager = make_manager([full(4)], log_stats=True)
    request = make_kv_request("a", range(9))
    admit(manager, request)
    manager.free(request)
    request.num_computed_tokens = 0
    request.num_preemptions += 1
    request.status = RequestStatus.PREEMPTED
    assert admit(manager, request) == 8
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits) == (1, 9, 0)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 9, 8)
    assert manager.make_prefix_cache_stats().requests == 0
    assert make_manager([full(4)]).make_prefix_cache_stats() is None


def test_reset_is_reported_and_waits_for_the_blocks_in_use():
    manager = make_manager([full(4)], log_stats=True)
    request = make_kv_request("a", range(9))
    admit(manager, request)
    assert not manager.reset_prefix_cache() and not manager.prefix_cache_stats.reset
    manager.free(request)
    assert manager.reset_prefix_cache() and manager.make_prefix_cache_stats().reset
    assert hit_length(manager, range(9)) == 0


def test_usage_is_zero_once_all_are_freed():
    manager = make_manager([full(4)], num_blocks=11)
    requests = [make_kv_request(str(i), range(i, i + 8)) for i in range(5)]
    for request in requests:
        admit(manager, request)
    assert manager.usage == 1.0
    for request in requests:
        manager.free(request)
        manager.free(request)
    assert manager.usage == 0.0


# ---------------------------------------------------------------- slots


def test_a_token_that_fits_the_last_block_costs_nothing():
    manager = make_manager([full(4)])
    request = make_kv_request("a", range(5))
    admit(manager, request)
    allocated = []
    for token in range(8):
        request.append_output_token_ids(token)
        blocks = manager.allocate_slots(request, 1)
        request.num_computed_tokens += 1
        allocated.append(blocks.get_block_ids(allow_none=True))
    assert [ids is not None for ids in allocated] == [False] * 3 + [True] + [False] * 3 + [True]
    assert manager.coordinator.unchanged_until["a"] == 15
    manager.free(request)
    assert "a" not in manager.coordinator.unchanged_until


def test_no_new_tokens_is_an_error():
    manager = make_manager([full(4)])
    with pytest.raises(ValueError, match="num_new_tokens must be greater than 0"):
        manager.allocate_slots(make_kv_request("a", range(5)), 0)


def test_lookahead_slots_are_allocated_and_drafts_not_cached():
    manager = make_manager([full(4)])
    request = make_kv_request("a", range(6))
    manager.allocate_slots(request, 6, num_lookahead_tokens=3)
    assert len(manager.get_block_ids("a")[0]) == 3
    request.num_computed_tokens = 6
    request.append_output_token_ids(6)
    # One token and two drafts fill block 1, yet only 7 tokens are the request's own.
    manager.allocate_slots(request, 3, num_lookahead_tokens=3)
    assert hit_length(manager, range(20)) == 4


def test_slots_end_at_max_model_len():
    manager = make_manager([full(4)], max_model_len=10)
    request = make_kv_request("a", range(10))
    manager.allocate_slots(request, 10, num_lookahead_tokens=8)
    assert len(manager.get_block_ids("a")[0]) == 3


def test_too_few_blocks_change_nothing():
    manager = make_manager([full(4)], num_blocks=4)
    first = make_kv_request("a", range(8))
    admit(manager, first)
    second = make_kv_request("b", range(50, 58))
    assert manager.allocate_slots(second, 8) is None
    assert free_blocks(manager) == 1 and manager.get_block_ids("b") == ([],)


def test_admission_of_a_whole_sequence_looks_beyond_its_first_chunk():
    manager = make_manager([full(4)], num_blocks=6)
    request = make_kv_request("a", range(24))
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 4) is not None


def test_a_windowed_prompt_longer_than_the_pool_is_admitted_by_its_cap():
    manager = make_manager([window(4, 8)], num_blocks=8, max_num_batched_tokens=8)
    request = make_kv_request("a", range(200))
    while request.num_computed_tokens < 200:
        first = request.num_computed_tokens == 0
        assert manager.allocate_slots(request, 8, full_sequence_must_fit=first) is not None
        request.num_computed_tokens += 8


def test_watermark_holds_back_admissions_but_not_running_requests():
    manager = make_manager([full(4)], num_blocks=10, watermark=0.3)
    assert manager.watermark_blocks == 3
    request = make_kv_request("a", range(28))
    assert manager.allocate_slots(request, 28) is None
    assert manager.allocate_slots(request, 28, has_scheduled_reqs=False) is not None
    request.num_computed_tokens = 28
    request.append_output_token_ids(1)
    request.status = RequestStatus.RUNNING
    assert manager.allocate_slots(request, 1) is not None
    assert free_blocks(manager) == 1
    request.status = RequestStatus.PREEMPTED
    assert manager.allocate_slots(request, 1) is None


def test_reserved_blocks_stay_free():
    manager = make_manager([full(4)], num_blocks=6)
    request = make_kv_request("a", range(16))
    assert manager.allocate_slots(request, 16, reserved_blocks=2) is None
    assert manager.allocate_slots(request, 12, reserved_blocks=2) is not None
    assert manager.allocate_slots(request, 4, reserved_blocks=3) is None


def test_external_tokens_get_blocks_that_the_caller_caches_later():
    manager = make_manager([full(4)])
    request = make_kv_request("a", range(12))
    blocks = manager.allocate_slots(
        request, 0, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    assert blocks is manager.empty_kv_cache_blocks
    assert len(manager.get_block_ids("a")[0]) == 2 and hit_length(manager, range(12)) == 0
    manager.cache_blocks(request, 8)
    assert hit_length(manager, range(12)) == 8
    request.num_computed_tokens = 8
    assert manager.allocate_slots(request, 4) is not None
    assert len(manager.get_block_ids("a")[0]) == 3


def test_external_blocks_do_not_evict_hits_of_another_group():
    manager = make_manager([full(4), window(4, 100)], num_blocks=9)
    first = make_kv_request("a", range(12))
    admit(manager, first)
    manager.free(first)
    second = make_kv_request("b", range(17))
    hits, num_hits = manager.get_computed_blocks(second)
    assert num_hits == 12 and free_blocks(manager) == 8
    manager.allocate_slots(second, 0, num_hits, hits, num_external_computed_tokens=4)
    tables = manager.get_block_ids("b")
    assert [len(table) for table in tables] == [4, 4]
    assert len({*tables[0], *tables[1]}) == 8
    assert [table[:3] for table in tables] == list(hits.get_block_ids())


def test_popped_blocks_stay_used_until_the_caller_frees_them():
    manager = make_manager([full(4)], num_blocks=6)
    request = make_kv_request("a", range(12))
    admit(manager, request)
    blocks = manager.pop_blocks_for_free(request)
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert free_blocks(manager) == 2 and manager.get_block_ids("a") == ([],)
    manager.block_pool.free_blocks(reversed(blocks))
    assert free_blocks(manager) == 5


def test_evicted_blocks_are_not_hit_and_stay_with_their_request():
    manager = make_manager([full(4)])
    request = make_kv_request("a", range(12))
    admit(manager, request)
    manager.evict_blocks({manager.get_block_ids("a")[0][1]})
    assert hit_length(manager, range(13)) == 4
    assert len(manager.get_block_ids("a")[0]) == 3


def test_tables_cut_to_computed_tokens_keep_states_whole():
    manager = make_manager([full(4), mamba(4)])
    manager.allocate_slots(make_kv_request("a", range(12)), 12)
    full_ids, states = manager.get_block_ids_for_computed_tokens("a", 5)
    assert len(full_ids) == 2 and len(states) == 3


def test_common_prefix_of_running_requests():
    manager = make_manager([full(4), window(4, 8)])
    admit(manager, make_kv_request("a", range(12)))
    admit(manager, make_kv_request("b", range(14)))
    assert manager.get_num_common_prefix_blocks("a") == [3, 0]


# ---------------------------------------------------------------- groups


def test_kind_of_coordinator():
    assert isinstance(make_manager([full(4)]).coordinator, UnitaryKVCacheCoordinator)
    hybrid = make_manager([full(4), window(4, 8), window(4, 8)]).coordinator
    assert isinstance(hybrid, HybridKVCacheCoordinator)
    assert [group.group_ids for group in hybrid.attention_groups] == [[0], [1, 2]]
    with pytest.raises(AssertionError, match="at least two attention groups"):
        make_manager([full(4), full(4)])


def test_model_without_groups_still_takes_requests():
    manager = KVCacheManager(KVCacheConfig(1, [], []), 64, 4, 4, enable_caching=False)
    request = make_kv_request("a", range(6))
    for num_new in (6, 1):
        blocks = manager.allocate_slots(request, num_new)
        assert blocks.get_block_ids() == ()
        request.num_computed_tokens += num_new
    manager.free(request)
    assert manager.usage == 0.0


def test_hybrid_hit_is_the_longest_that_every_group_has():
    manager = make_manager([window(4, 8), full(4)], num_blocks=40)
    first = make_kv_request("a", range(33))
    admit(manager, first)
    # The window needs tokens 25 on; the group has freed nothing as all was one step.
    assert hit_length(manager, range(33)) == 32
    windowed = manager.coordinator.single_type_managers[0].req_to_blocks["a"]
    manager.evict_blocks({windowed[7].block_id})
    assert hit_length(manager, range(33)) == 28
    manager.evict_blocks({windowed[5].block_id})
    assert hit_length(manager, range(33)) == 20
    assert manager.coordinator.num_uncached_common_prefix_tokens == 12
    second = make_kv_request("b", range(33))
    assert admit(manager, second) == 20
    table = manager.get_block_ids("b")[0]
    assert table[:3] == [0, 0, 0] and 0 not in table[3:]


def test_full_groups_of_two_layouts_are_cut_to_the_common_hit():
    manager = make_manager([full(4), full(4, sliding_window=8), window(4, 8)], num_blocks=40)
    admit(manager, make_kv_request("a", range(17)))
    windowed = manager.coordinator.single_type_managers[2].req_to_blocks["a"]
    manager.evict_blocks({windowed[3].block_id})
    hits, num_hits = manager.get_computed_blocks(make_kv_request("b", range(17)))
    assert num_hits == 12 and [len(group) for group in hits.blocks] == [3, 3, 3]


def test_groups_of_different_block_sizes_hit_at_common_multiples():
    manager = make_manager([full(8), window(4, 4)], num_blocks=40)
    admit(manager, make_kv_request("a", range(30)))
    hits, num_hits = manager.get_computed_blocks(make_kv_request("b", range(30)))
    assert num_hits == 24 and [len(group) for group in hits.blocks] == [3, 6]
    # The window of 4 needs one block of 4 before each multiple of 8: the others aren't cached.
    windowed = manager.coordinator.single_type_managers[1].req_to_blocks["a"]
    assert [block.block_hash is not None for block in windowed] == [False, True] * 3 + [False] * 2


def test_eagle_recomputes_the_last_block():
    manager = make_manager([full(4)], use_eagle=True)
    tokens = list(range(13))
    admit(manager, make_kv_request("a", tokens))
    assert hit_length(manager, tokens) == 8
    hybrid = make_manager([full(4), window(4, 6)], use_eagle=True)
    admit(hybrid, make_kv_request("a", tokens))
    assert hit_length(hybrid, tokens) == 8


def test_chunked_attention_beside_full_attention():
    manager = make_manager([full(4), chunked(4, 8)], num_blocks=40)
    request = make_kv_request("a", range(20))
    admit(manager, request)
    request.append_output_token_ids(0)
    manager.allocate_slots(request, 1)
    assert manager.get_block_ids("a")[1][:4] == [0] * 4
    assert hit_length(manager, range(20)) == 16


def test_chunk_that_ends_inside_a_block_is_left_on_time():
    manager = make_manager([chunked(4, 6)], enable_caching=False)
    request = make_kv_request("a", [0])
    for length in range(1, 20):
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens = length
        request.append_output_token_ids(0)
        num_null = manager.get_block_ids("a")[0].count(0)
        assert num_null == (length - 1) // 6 * 6 // 4
    with pytest.raises(UserError, match=r"cache\.block_size=4 does not divide"):
        make_manager([full(4), chunked(4, 6)])


def test_retention_interval_thins_out_the_window_only():
    manager = make_manager([full(4), window(4, 4)], num_blocks=60, retention_interval=16)
    admit(manager, make_kv_request("a", range(42)))
    kept = [
        [block.block_hash is not None for block in m.req_to_blocks["a"]]
        for m in manager.coordinator.single_type_managers
    ]
    assert kept[0] == [True] * 10 + [False]
    # Every fourth block, and the last one before token 41 for a repeat of the prompt.
    assert kept[1] == [False, False, False, True] * 2 + [False, True, False]
    assert hit_length(manager, range(42)) == 40
    assert hit_length(manager, range(39)) == 32


@pytest.mark.parametrize(
    ("specs", "interval", "message"),
    [
        ([full(4)], 8, "no sliding-window or Mamba"),
        ([full(4), window(8, 8)], 12, "multiple of scheduler_block_size"),
        ([full(4), window(4, 8)], -4, "non-negative"),
    ],
)
def test_retention_interval_that_can_not_work_is_refused(specs, interval, message):
    with pytest.raises(UserError, match=message):
        make_manager(specs, retention_interval=interval)


def test_context_parallelism_is_refused():
    with pytest.raises(AssertionError, match="context parallelism"):
        make_manager([full(4)], dcp_world_size=2)


def test_stored_events_carry_the_kind_of_their_group():
    manager = make_manager([full(4), window(4, 8)], enable_kv_cache_events=True)
    admit(manager, make_kv_request("a", range(8)))
    events = manager.take_events()
    kinds = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in events]
    assert kinds == [(0, "full_attention", None), (1, "sliding_window", 8)]
    assert manager.take_events() == []
