# SPDX-License-Identifier: Apache-2.0
"""Whatever requests come, grow, are preempted and end: the pool's books balance.

Checked after every operation: no block is leaked or handed out twice, reference counts are those
of the tables, free and used add up, the least recently used cached block is next to be evicted,
and every block a request hits holds the keys and values of exactly that request's tokens.
"""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from kv_helpers import chunked, full, make_kv_request, make_manager, mamba, window

from vllmx.core.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllmx.request import RequestStatus

LAYOUTS = {
    "full": [full(2)],
    "window": [window(4, 6)],
    "full and window": [full(4), window(4, 3), window(4, 3)],
    "two windows and full": [window(2, 4), window(2, 7), full(2)],
    "blocks of two sizes": [full(4), window(2, 4)],
    "full and chunked": [full(2), chunked(2, 6)],
    "full and states": [full(2), mamba(2)],
    "full and aligned states": [full(2), mamba(2, "align", 1)],
}
MAX_LEN = 30


def attended_from(spec, length):
    """First token that the token after `length` attends to, or whose state it continues."""
    if isinstance(spec, SlidingWindowSpec):
        return max(0, length - spec.sliding_window + 1)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return length - length % spec.attention_chunk_size
    if isinstance(spec, MambaSpec):
        return length - 1
    return 0


class KVCacheMachine(RuleBasedStateMachine):
    """A scheduler that does anything a scheduler may do, in any order.

    Each operation runs on two managers: one as it is, one that is made to forget that a step may
    have nothing to do. They must agree on everything.
    """

    def __init__(self, specs):
        super().__init__()
        self.specs = specs
        self.running = []

    @initialize(
        num_blocks=st.integers(6, 24),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.15]),
    )
    def start(self, num_blocks, caching, watermark):
        arguments = {
            "num_blocks": num_blocks,
            "max_model_len": MAX_LEN,
            "max_num_batched_tokens": 8,
            "enable_caching": caching,
            "watermark": watermark,
        }
        self.manager = make_manager(self.specs, **arguments)
        self.slow = make_manager(self.specs, **arguments)
        self.num_blocks = num_blocks
        self.hash_block_size = self.manager.coordinator.hash_block_size
        self.waiting = []
        self.num_requests = 0
        self.freed_at = [0] * num_blocks
        self.clock_frees(self.manager.block_pool)
        # (group, block id, slot) -> the tokens up to and including the one computed there.
        self.written = {}

    def clock_frees(self, pool):
        free_blocks = pool.free_blocks
        clock = itertools.count(1)

        def free_and_note(blocks):
            blocks = list(blocks)
            free_blocks(blocks)
            now = next(clock)
            for block in blocks:
                if block.ref_cnt == 0:
                    self.freed_at[block.block_id] = now

        pool.free_blocks = free_and_note

    def tables(self, request):
        return self.manager.get_block_ids(request.request_id)

    # ------------------------------------------------------------ operations

    @rule(
        shared=st.integers(0, 16),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([None, None, None, "s"]),
        data=st.data(),
    )
    def arrive(self, shared, own, salt, data):
        if len(self.waiting) < 3:
            self.num_requests += 1
            tokens = [7] * shared + own
            name = str(self.num_requests)
            request = make_kv_request(name, tokens, self.hash_block_size, cache_salt=salt)
            self.waiting.append(request)
        self.admit(data)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def admit(self, data):
        request = self.waiting[0]
        hits, num_hits = self.manager.get_computed_blocks(request)
        slow_hits, slow_num_hits = self.slow.get_computed_blocks(request)
        assert (num_hits, hits.get_block_ids()) == (slow_num_hits, slow_hits.get_block_ids())
        assert num_hits < request.num_tokens
        num_new = data.draw(st.integers(1, request.num_tokens - num_hits))
        options = {
            "full_sequence_must_fit": data.draw(st.booleans()),
            "reserved_blocks": data.draw(st.sampled_from([0, 0, 0, 2])),
            "has_scheduled_reqs": data.draw(st.booleans()),
        }
        blocks = self.manager.allocate_slots(request, num_new, num_hits, hits, **options)
        slow = self.slow.allocate_slots(request, num_new, num_hits, slow_hits, **options)
        assert (blocks is None) == (slow is None)
        if blocks is None:
            return
        assert blocks.get_block_ids() == slow.get_block_ids()
        self.waiting.pop(0)
        self.running.append(request)
        request.status = RequestStatus.RUNNING
        if num_hits:
            self.check_contents(request, num_hits)
        self.write(request, num_hits, num_new)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5),
        lookahead=st.sampled_from([0, 0, 2]),
    )
    def run(self, data, tokens, lookahead):
        request = data.draw(st.sampled_from(self.running))
        for token in tokens:
            if request.num_computed_tokens == request.num_tokens:
                if request.num_tokens == MAX_LEN:
                    self.end(request)
                    return
                request.append_output_token_ids(token)
            num_new = data.draw(st.integers(1, request.num_tokens - request.num_computed_tokens))
            blocks = self.manager.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
            self.slow.coordinator.unchanged_until.clear()
            slow = self.slow.allocate_slots(request, num_new, num_lookahead_tokens=lookahead)
            assert (blocks is None) == (slow is None)
            if blocks is None:
                self.preempt(data.draw(st.sampled_from(self.running)))
                return
            assert blocks.get_block_ids() == slow.get_block_ids()
            self.write(request, request.num_computed_tokens, num_new)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), preempt=st.booleans(), deferred=st.booleans())
    def stop(self, data, preempt, deferred):
        request = data.draw(st.sampled_from(self.running))
        if preempt:
            self.preempt(request)
        else:
            self.end(request, deferred)

    @rule(
        what=st.sampled_from(["step"] * 4 + ["abort", "reset", "evict"]),
        ids=st.sets(st.integers(1, 5), max_size=2),
    )
    def something_else(self, what, ids):
        for manager in (self.manager, self.slow):
            if what == "step":
                manager.new_step_starts()
            elif what == "abort" and self.waiting:
                manager.free(self.waiting[-1])
            elif what == "reset":
                assert manager.reset_prefix_cache() == (not self.running)
            elif what == "evict":
                manager.evict_blocks(ids)
        if what == "abort":
            del self.waiting[-1:]

    def end(self, request, deferred=False):
        tables = self.tables(request)
        for manager in (self.manager, self.slow):
            if deferred:
                blocks = manager.pop_blocks_for_free(request)
                manager.block_pool.free_blocks(reversed(blocks))
            else:
                manager.free(request)
        self.running.remove(request)
        # A chain is evicted from its tail, as a block without those before it is of no use.
        blocks = self.manager.block_pool.blocks
        queue = self.manager.block_pool.free_block_queue.get_all_free_blocks()
        places = {block.block_id: i for i, block in enumerate(queue)}
        for table in tables:
            mine = [places[i] for i in table if i in places and blocks[i].block_hash is not None]
            assert mine == sorted(mine, reverse=True)

    def preempt(self, request):
        self.end(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self.waiting.insert(0, request)

    # ------------------------------------------------------------ contents

    def write(self, request, start, count):
        """Compute `count` tokens from `start`: each slot now holds what its prefix gives."""
        request.num_computed_tokens = start + count
        prefix = [request.cache_salt, *request.all_token_ids]
        for group, (spec, table) in enumerate(zip(self.specs, self.tables(request), strict=True)):
            for position in range(start, start + count):
                block_id = table[position // spec.block_size]
                if block_id != 0:
                    slot = position % spec.block_size
                    self.written[group, block_id, slot] = prefix[: position + 2]

    def check_contents(self, request, length):
        """What the token after `length` attends to is there and is of this request's prefix."""
        prefix = [request.cache_salt, *request.all_token_ids]
        for group, (spec, table) in enumerate(zip(self.specs, self.tables(request), strict=True)):
            for position in range(attended_from(spec, length), length):
                block_id = table[position // spec.block_size]
                slot = position % spec.block_size
                assert self.written[group, block_id, slot] == prefix[: position + 2]

    # ------------------------------------------------------------ books

    @invariant()
    def every_block_is_free_or_used_and_counted(self):
        if not hasattr(self, "manager"):
            return
        pool = self.manager.block_pool
        held = Counter()
        groups_of = {}
        for request in self.running:
            for group, table in enumerate(self.tables(request)):
                used = [block_id for block_id in table if block_id != 0]
                assert len(set(used)) == len(used)
                held.update(used)
                for block_id in used:
                    assert groups_of.setdefault(block_id, group) == group
        queue = pool.free_block_queue.get_all_free_blocks()
        free = {block.block_id for block in queue}
        assert len(free) == len(queue) == pool.get_num_free_blocks()
        assert free | set(held) == set(range(1, self.num_blocks)) and not free & set(held)
        for block in pool.blocks[1:]:
            assert block.ref_cnt == held[block.block_id]
            if held[block.block_id] > 1:
                assert self.manager.enable_caching
        self.check_prefix_cache(pool)
        ages = [self.freed_at[b.block_id] for b in queue if b.block_hash is not None]
        assert ages == sorted(ages)

    def check_prefix_cache(self, pool):
        found = {}
        for key, value in pool.cached_block_hash_to_block._cache.items():
            for block in value.values() if isinstance(value, dict) else [value]:
                assert block.block_hash == key and not block.is_null
                found[block.block_id] = block
        hashed = {block.block_id for block in pool.blocks if block.block_hash is not None}
        assert set(found) == hashed

    @invariant()
    def both_managers_agree(self):
        if not hasattr(self, "manager"):
            return
        queues = [
            [block.block_id for block in m.block_pool.free_block_queue.get_all_free_blocks()]
            for m in (self.manager, self.slow)
        ]
        assert queues[0] == queues[1]
        caches = [m.block_pool.cached_block_hash_to_block._cache for m in (self.manager, self.slow)]
        assert caches[0].keys() == caches[1].keys()
        for request in self.running:
            assert self.tables(request) == self.slow.get_block_ids(request.request_id)

    @invariant()
    def what_the_next_token_attends_to_is_there(self):
        for request in self.running:
            for spec, table in zip(self.specs, self.tables(request), strict=True):
                assert len(table) * spec.block_size >= request.num_computed_tokens
            self.check_contents(request, request.num_computed_tokens)


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_books_balance_and_hits_hold_what_they_claim(layout):
    run_state_machine_as_test(lambda: KVCacheMachine(LAYOUTS[layout]), settings=SETTINGS)
