# SPDX-License-Identifier: Apache-2.0
"""The free queue, the prefix-cache map, the pool's life of a block, events and metrics."""

import random
from types import SimpleNamespace

import msgspec
import pytest
from kv_helpers import make_kv_request

from vllmx.core import kv_cache_metrics
from vllmx.core.block_hash import make_block_hash_with_group_id, maybe_convert_block_hash
from vllmx.core.block_pool import BlockHashToBlockMap, BlockPool
from vllmx.core.kv_cache_block import FreeKVCacheBlockQueue, KVCacheBlock
from vllmx.core.kv_cache_metrics import KVCacheMetricsCollector
from vllmx.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored


def ids(blocks):
    return [block.block_id for block in blocks]


def test_block_takes_one_hash_until_it_is_reset():
    block = KVCacheBlock(3)
    block.set_block_hash(b"key", num_tokens=8)
    assert (block.block_hash, block.block_hash_num_tokens) == (b"key", 8)
    with pytest.raises(AssertionError):
        block.set_block_hash(b"other")
    block.reset_hash()
    assert block.block_hash is None and block.block_hash_num_tokens is None
    assert not hasattr(block, "__dict__")
    assert "block_id=3" in repr(block)


def test_queue_behaves_like_a_list_whatever_is_done_to_it():
    rng = random.Random(0)
    blocks = [KVCacheBlock(i) for i in range(12)]
    queue, model, outside = FreeKVCacheBlockQueue(blocks), list(blocks), []
    for _ in range(2000):
        operation = rng.randrange(6)
        if operation == 0 and model:
            outside.append(queue.popleft())
            assert outside[-1] is model.pop(0)
        elif operation == 1:
            count = rng.randint(0, len(model))
            taken = queue.popleft_n(count)
            assert taken == model[:count]
            del model[:count]
            outside += taken
        elif operation == 2 and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
            outside.append(block)
        elif outside:
            rng.shuffle(outside)
            count = 1 if operation == 3 else rng.randint(0, len(outside))
            given = outside[:count]
            del outside[:count]
            if operation == 3:
                queue.append(given[0])
                model += given
            elif operation == 4:
                queue.append_n(given)
                model += given
            else:
                queue.prepend_n(given)
                model = given + model
        assert queue.get_all_free_blocks() == model
        assert queue.num_free_blocks == len(model)
        assert all(b.prev_free_block is None and b.next_free_block is None for b in outside)


def test_queue_refuses_what_is_not_there():
    queue = FreeKVCacheBlockQueue([])
    with pytest.raises(ValueError, match="No free blocks available"):
        queue.popleft()
    with pytest.raises(AssertionError):
        queue.popleft_n(1)
    with pytest.raises(RuntimeError, match="invalid block"):
        queue.remove(KVCacheBlock(0))


def test_map_keeps_one_block_bare_and_several_in_order():
    cache = BlockHashToBlockMap()
    first, second = KVCacheBlock(1), KVCacheBlock(2)
    assert cache.get_one_block(b"k") is None and cache.pop(b"k", 1) is None
    cache.insert(b"k", first)
    cache.insert(b"k", second)
    assert len(cache) == 1 and cache.get_one_block(b"k") is first
    assert cache.contain(b"k", 2) and not cache.contain(b"k", 3) and not cache.contain(b"x", 2)
    assert cache.pop(b"k", 3) is None
    assert cache.pop(b"k", 1) is first and cache.get_one_block(b"k") is second
    assert cache.pop(b"k", 2) is second and len(cache) == 0
    cache.insert(b"k", first)
    assert cache.pop(b"k", 2) is None and cache.contain(b"k", 1)


def fill(pool, request, num_blocks, block_size=4, group=0):
    blocks = pool.get_new_blocks(num_blocks)
    pool.cache_full_blocks(request, blocks, 0, num_blocks, block_size, group)
    return blocks


def test_null_block_is_block_0_and_never_handed_out():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    assert pool.null_block.block_id == 0 and pool.null_block.is_null
    assert ids(pool.get_new_blocks(3)) == [1, 2, 3]
    with pytest.raises(ValueError, match="Cannot get 1 free blocks"):
        pool.get_new_blocks(1)
    pool.free_blocks([pool.null_block])
    assert pool.get_num_free_blocks() == 0


def test_usage_leaves_the_null_block_out():
    pool = BlockPool(5, enable_caching=True, hash_block_size=4)
    assert pool.get_usage() == 0.0
    blocks = pool.get_new_blocks(2)
    assert pool.get_usage() == 0.5
    pool.free_blocks(blocks)
    assert pool.get_usage() == 0.0
    assert BlockPool(1, enable_caching=False, hash_block_size=4).get_usage() == 0.0


def test_freed_block_is_found_until_it_is_taken_and_least_recent_goes_first():
    pool = BlockPool(6, enable_caching=True, hash_block_size=4)
    old = make_kv_request("old", [1] * 8)
    new = make_kv_request("new", [2] * 8)
    old_blocks, new_blocks = fill(pool, old, 2), fill(pool, new, 2)
    pool.free_blocks(reversed(old_blocks))
    pool.free_blocks(reversed(new_blocks))
    # Block 5 was never used; then old's tail, old's head, new's tail, new's head.
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [5, 2, 1, 4, 3]
    assert pool.get_cached_block(old.block_hashes[1], [0]) == [old_blocks[1]]
    pool.get_new_blocks(2)
    assert pool.get_cached_block(old.block_hashes[1], [0]) is None
    assert pool.get_cached_block(old.block_hashes[0], [0]) == [old_blocks[0]]


def test_blocks_without_a_hash_are_taken_before_cached_ones():
    pool = BlockPool(6, enable_caching=True, hash_block_size=4)
    cached = fill(pool, make_kv_request("a", [1] * 8), 2)
    scratch = pool.get_new_blocks(2)
    pool.free_blocks(reversed(cached + scratch))
    assert ids(pool.free_block_queue.get_all_free_blocks()) == [4, 3, 5, 2, 1]


def test_touch_takes_a_block_out_of_the_queue_and_counts_holders():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    blocks = fill(pool, make_kv_request("a", [1] * 8), 2)
    pool.touch(blocks)
    assert [b.ref_cnt for b in blocks] == [2, 2] and pool.get_num_free_blocks() == 1
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 1
    pool.free_blocks(reversed(blocks))
    assert pool.get_num_free_blocks() == 3
    pool.touch(blocks[:1])
    assert blocks[0].ref_cnt == 1 and pool.get_num_free_blocks() == 2


def test_lookup_needs_the_block_in_every_group():
    pool = BlockPool(6, enable_caching=True, hash_block_size=4)
    request = make_kv_request("a", [1] * 4)
    (in_0,) = fill(pool, request, 1, group=0)
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) is None
    (in_1,) = fill(pool, request, 1, group=1)
    assert pool.get_cached_block(request.block_hashes[0], [0, 1]) == [in_0, in_1]


def test_masked_and_null_blocks_are_not_cached():
    pool = BlockPool(6, enable_caching=True, hash_block_size=4)
    request = make_kv_request("a", range(12))
    blocks = [pool.null_block, *pool.get_new_blocks(2)]
    pool.cache_full_blocks(request, blocks, 0, 3, 4, 0, block_mask=[True, False, True])
    found = [pool.get_cached_block(block_hash, [0]) for block_hash in request.block_hashes]
    assert found == [None, None, [blocks[2]]]
    assert blocks[2].block_hash_num_tokens == 12


def test_equal_blocks_stay_apart_and_both_are_found_in_turn():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    request = make_kv_request("a", [1] * 4)
    (first,), (second,) = fill(pool, request, 1), fill(pool, request, 1)
    assert first is not second
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [first]
    pool.evict_blocks({first.block_id})
    assert pool.get_cached_block(request.block_hashes[0], [0]) == [second]
    assert first.block_hash is None and first.ref_cnt == 1


def test_evicting_a_block_that_is_not_cached_does_nothing():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    pool.evict_blocks({1, 2})
    with pytest.raises(AssertionError, match="Invalid block_id 4"):
        pool.evict_blocks({4})


def test_reset_needs_all_blocks_free():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    request = make_kv_request("a", [1] * 4)
    blocks = fill(pool, request, 1)
    assert not pool.reset_prefix_cache()
    assert pool.get_cached_block(request.block_hashes[0], [0]) == blocks
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(request.block_hashes[0], [0]) is None
    assert all(block.block_hash is None for block in pool.blocks)


def test_partial_block_is_found_until_it_is_full():
    pool = BlockPool(4, enable_caching=True, hash_block_size=2, enable_kv_cache_events=True)
    request = make_kv_request("a", range(12), hash_block_size=2)
    hashes = request.block_hashes
    blocks = pool.get_new_blocks(2)
    pool.cache_full_blocks(request, blocks, 0, 1, 6, 0)
    key = pool.cache_partial_block(request, blocks[1], 10, 0, 6)
    assert key == make_block_hash_with_group_id(hashes[4], 0)
    assert pool.cache_partial_block(request, blocks[1], 10, 0, 6) == key
    # A shorter prefix of a block that has a longer one is a second way to find it.
    pool.cache_partial_block(request, blocks[1], 8, 0, 6)
    assert pool.get_cached_block(hashes[3], [0]) == pool.get_cached_block(hashes[4], [0])
    assert pool.cache_partial_block(request, pool.null_block, 10, 0, 6) is None
    pool.cache_full_blocks(request, blocks, 1, 2, 6, 0)
    assert pool.get_cached_block(hashes[3], [0]) is pool.get_cached_block(hashes[4], [0]) is None
    assert pool.get_cached_block(hashes[5], [0]) == [blocks[1]]
    assert not pool.cached_block_hashes_by_block
    events = [(type(event).__name__, len(event.token_ids)) for event in pool.take_events()[:3]]
    assert events == [("BlockStored", 6), ("BlockStored", 2), ("BlockStored", 2)]


def test_evicting_a_block_drops_every_key_of_it():
    pool = BlockPool(2, enable_caching=True, hash_block_size=2)
    request = make_kv_request("a", range(10), hash_block_size=2)
    blocks = pool.get_new_blocks(1)
    pool.cache_partial_block(request, blocks[0], 10, 0, 6)
    pool.cache_partial_block(request, blocks[0], 8, 0, 6)
    pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    assert len(pool.cached_block_hash_to_block) == 0


def test_events_tell_what_is_stored_removed_and_cleared():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4, enable_kv_cache_events=True)
    request = make_kv_request("a", range(12), cache_salt="s")
    hashes = [maybe_convert_block_hash(h) for h in request.block_hashes]
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(request, blocks, 0, 2, 4, 7)
    pool.cache_full_blocks(request, blocks, 2, 3, 4, 7)
    first, second = pool.take_events()
    assert (first.block_hashes, first.parent_block_hash) == (hashes[:2], None)
    assert (first.token_ids, first.extra_keys) == (list(range(8)), [("s",), None])
    assert (second.block_hashes, second.parent_block_hash) == (hashes[2:], hashes[1])
    assert (second.block_size, second.medium, second.group_idx) == (4, "GPU", 7)
    pool.free_blocks(reversed(blocks))
    pool.get_new_blocks(1)
    (removed,) = pool.take_events()
    assert removed == BlockRemoved(block_hashes=[hashes[2]], medium="GPU", group_idx=7)
    pool.free_blocks([blocks[2]])
    pool.reset_prefix_cache()
    assert pool.take_events() == [AllBlocksCleared()] and pool.take_events() == []


def test_events_are_off_by_default():
    pool = BlockPool(4, enable_caching=True, hash_block_size=4)
    fill(pool, make_kv_request("a", [1] * 4), 1)
    assert pool.take_events() == [] and pool.kv_event_queue == []


def test_events_travel_as_tagged_maps():
    event = BlockStored([1], None, [5], 1, None, "GPU", None, group_idx=0)
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    assert data["type"] == "BlockStored" and data["token_ids"] == [5] and "extra_keys" not in data
    assert hash(event) == hash(BlockStored([1], None, [5], 1, None, "GPU", None, group_idx=0))


def test_metrics_follow_a_block_from_allocation_to_eviction(monkeypatch):
    seconds = iter(range(0, 10**12, 10**9))
    clock = SimpleNamespace(monotonic_ns=lambda: next(seconds))
    monkeypatch.setattr(kv_cache_metrics, "time", clock)
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    pool = BlockPool(2, True, 4, metrics_collector=collector)
    request = make_kv_request("a", [1] * 4)
    blocks = fill(pool, request, 1)  # 0 s
    pool.touch(blocks)  # 1 s
    pool.touch(blocks)  # 2 s
    for _ in range(3):
        pool.free_blocks(blocks)
    pool.get_new_blocks(1)  # evicted at 3 s and 4 s, as each question asks the clock
    (event,) = collector.drain_events()
    assert (event.lifetime_seconds, event.idle_seconds) == (3.0, 2.0)
    assert event.reuse_gaps_seconds == (1.0,)
    assert collector.drain_events() == []
    collector.reset()
    assert not collector.block_metrics


def test_sampling_follows_only_some_blocks():
    collector = KVCacheMetricsCollector(sample_rate=1e-9)
    pool = BlockPool(9, True, 4, metrics_collector=collector)
    pool.get_new_blocks(8)
    assert not collector.block_metrics
    with pytest.raises(AssertionError):
        KVCacheMetricsCollector(sample_rate=0)
