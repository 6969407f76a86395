# SPDX-License-Identifier: Apache-2.0
"""Whatever requests come, grow, are preempted and end: the pool's books balance.

Checked after every operation: no block is leaked or handed out twice, reference counts are those
of the tables, free and used add up, the least recently used cached block is next to be evicted,
and every block a request hits holds the keys and values of exactly that request's tokens.
"""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_helpers import chunked, full, make_kv_request, make_manager, mamba, window

from vllmx.request import RequestStatus

LAYOUTS = {
    "full": [full(2)],
    "window": [window(2, 5)],
    "full and window": [full(2), window(2, 3), window(2, 3)],
    "two windows and full": [window(2, 4), window(2, 7), full(2)],
    "blocks of two sizes": [full(4), window(2, 4)],
    "full and chunked": [full(2), chunked(2, 6)],
    "full and states": [full(2), mamba(2)],
    "full and aligned states": [full(2), mamba(2, "align", 1)],
}
MAX_LEN = 24


class KVCacheMachine(RuleBasedStateMachine):
    """A scheduler that does anything a scheduler may do, in any order.

    Each operation runs on two managers: one as it is, one that is made to forget that a step may
    have nothing to do. They must agree on everything.
    """

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        num_blocks=st.integers(6, 30),
        caching=st.sampled_from([True, True, True, False]),
        watermark=st.sampled_from([0.0, 0.0, 0.15]),
    )
    def start(self, layout, num_blocks, caching, watermark):
        self.specs = LAYOUTS[layout]
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
        self.waiting = []
        self.running = []
        self.num_requests = 0
        self.clock = 0
        self.freed_at = dict.fromkeys(range(num_blocks), 0)
        self.was_free = set(range(1, num_blocks))
        # (group, block id, slot) -> the tokens up to and including the one computed there.
        self.written = {}

    def tables(self, request):
        return self.manager.get_block_ids(request.request_id)

    # ------------------------------------------------------------ operations

    @precondition(lambda self: len(self.waiting) < 3)
    @rule(
        shared=st.integers(0, 12),
        own=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        salt=st.sampled_from([None, None, "s"]),
    )
    def arrive(self, shared, own, salt):
        self.num_requests += 1
        tokens = [7] * shared + own
        self.waiting.append(
            make_kv_request(str(self.num_requests), tokens, 2, cache_salt=salt)
        )

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), whole=st.booleans(), reserved=st.integers(0, 2), alone=st.booleans())
    def admit(self, data, whole, reserved, alone):
        request = self.waiting[0]
        hits, num_hits = self.manager.get_computed_blocks(request)
        slow_hits, slow_num_hits = self.slow.get_computed_blocks(request)
        assert (num_hits, hits.get_block_ids()) == (slow_num_hits, slow_hits.get_block_ids())
        assert num_hits < request.num_tokens
        num_new = data.draw(st.integers(1, request.num_tokens - num_hits))
        options = {
            "full_sequence_must_fit": whole,
            "reserved_blocks": reserved,
            "has_scheduled_reqs": not alone,
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
        self.check_hits(request, num_hits)
        self.write(request, num_hits, num_new)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1), lookahead=st.sampled_from([0, 0, 2]))
    def run(self, data, token, lookahead):
        request = data.draw(st.sampled_from(self.running))
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

    @precondition(lambda self: self.waiting)
    @rule()
    def abort_waiting(self):
        for manager in (self.manager, self.slow):
            manager.free(self.waiting[-1])
        self.waiting.pop()

    @rule()
    def next_step(self):
        for manager in (self.manager, self.slow):
            manager.new_step_starts()

    @rule()
    def reset(self):
        done = [manager.reset_prefix_cache() for manager in (self.manager, self.slow)]
        assert done[0] == done[1] == (not self.running)

    @rule(data=st.data())
    def evict(self, data):
        ids = data.draw(st.sets(st.integers(1, self.num_blocks - 1), max_size=2))
        for manager in (self.manager, self.slow):
            manager.evict_blocks(ids)

    def end(self, request, deferred=False):
        for manager in (self.manager, self.slow):
            if deferred:
                blocks = manager.pop_blocks_for_free(request)
                manager.block_pool.free_blocks(reversed(blocks))
            else:
                manager.free(request)
        self.running.remove(request)

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

    def check_hits(self, request, num_hits):
        prefix = [request.cache_salt, *request.all_token_ids]
        for group, (spec, table) in enumerate(zip(self.specs, self.tables(request), strict=True)):
            for position in range(num_hits):
                block_id = table[position // spec.block_size]
                slot = position % spec.block_size
                is_state = spec.__class__.__name__ == "MambaSpec"
                if block_id == 0 or (is_state and slot != spec.block_size - 1):
                    continue
                assert self.written[group, block_id, slot] == prefix[: position + 2]
            # What the next token attends to must be there.
            manager = self.manager.coordinator.single_type_managers[group]
            first = max(manager.get_num_skipped_tokens(num_hits), 0) // spec.block_size
            assert 0 not in table[first : num_hits // spec.block_size]

    # ------------------------------------------------------------ books

    @invariant()
    def every_block_is_free_or_used_and_counted(self):
        if not hasattr(self, "manager"):
            return
        self.clock += 1
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
        for block_id in free - self.was_free:
            self.freed_at[block_id] = self.clock
        self.was_free = free
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
        for request in self.running:
            assert self.tables(request) == self.slow.get_block_ids(request.request_id)

    @invariant()
    def tables_cover_what_is_computed(self):
        for request in getattr(self, "running", ()):
            for spec, table in zip(self.specs, self.tables(request), strict=True):
                assert len(table) * spec.block_size >= request.num_computed_tokens


KVCacheMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestKVCache = KVCacheMachine.TestCase
