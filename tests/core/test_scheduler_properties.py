# SPDX-License-Identifier: Apache-2.0
"""Whatever arrives, in whatever pool: nothing leaks, nothing is shared wrongly, all of it ends.

The checked null runner plays the KV cache, so a step that would read or overwrite another
request's entries fails there; `Loop.check_pool` counts the blocks after every half step.
"""

import random
from dataclasses import dataclass, replace

import pytest
from engine_helpers import Loop, full_spec, make_config, make_request, window_spec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllmx.engine import FinishReason

LAYOUTS = {
    "full": lambda block_size: [full_spec(block_size)],
    "window": lambda block_size: [window_spec(block_size, 5)],
    "hybrid": lambda block_size: [full_spec(block_size), window_spec(block_size, 5)],
    "mixed_sizes": lambda block_size: [full_spec(2 * block_size), window_spec(block_size, 7)],
}


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: `shared` tokens of prompt family `family`, then tokens of its own."""

    at_step: int
    family: int
    shared: int
    own: int
    max_tokens: int
    priority: int
    abort_at: int | None
    abort_late: bool

    @property
    def num_prompt_tokens(self):
        return max(1, self.shared + self.own)

    def request(self, index, block_size):
        prompt = [100 * self.family + i for i in range(self.shared)]
        prompt += [10_000 * (index + 1) + i for i in range(self.num_prompt_tokens - self.shared)]
        return make_request(
            f"r{index}",
            prompt,
            self.max_tokens,
            block_size=block_size,
            priority=self.priority,
            arrival_time=self.at_step,
        )


arrivals = st.builds(
    Arrival,
    at_step=st.integers(0, 12),
    family=st.integers(0, 2),
    shared=st.integers(0, 24),
    own=st.integers(0, 40),
    max_tokens=st.integers(1, 14),
    priority=st.integers(0, 2),
    abort_at=st.one_of(st.none(), st.none(), st.integers(0, 25)),
    abort_late=st.booleans(),
)


@st.composite
def engines(draw):
    """Settings of an engine, small enough that blocks, places and tokens run short."""
    max_num_seqs = draw(st.integers(1, 6))
    chunked = draw(st.booleans())
    return {
        "block_size": 4,
        "num_blocks": draw(st.integers(5, 40)),
        "max_num_seqs": max_num_seqs,
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": (draw(st.integers(max_num_seqs, 40)) if chunked else 64),
        "caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 3, 7, 9, 16])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "async_scheduling": draw(st.booleans()),
    }


def play(settings_, layout, trace):
    """Run the trace with its aborts and return the loop, empty again."""
    config = make_config(max_model_len=64, **settings_)
    loop = Loop(config, LAYOUTS[layout](settings_["block_size"]))
    step = 0
    while step <= 26 or loop.scheduler.has_requests() or loop.in_flight:
        assert step < 1000, "the engine never gets done"
        for index, arrival in enumerate(trace):
            if arrival.at_step == step:
                loop.add(arrival.request(index, settings_["block_size"]))
        now = [(f"r{i}", a) for i, a in enumerate(trace) if a.abort_at == step]
        loop.abort(*[name for name, arrival in now if not arrival.abort_late])
        late = [name for name, arrival in now if arrival.abort_late]
        loop.step(lambda late=late: loop.abort(*late))
        step += 1
    assert not loop.scheduler.requests and not loop.runner.rows
    assert loop.scheduler.kv_cache_manager.usage == 0.0
    return loop


def check_outcome(loop, reference, settings_, layout, trace):
    for index, arrival in enumerate(trace):
        name = f"r{index}"
        expected = reference.tokens[name]
        got = loop.tokens[name]
        assert got == expected[: len(got)], "other tokens than with a huge pool"
        if len(got) == len(expected) or arrival.abort_at is not None:
            continue
        # Only a request that outgrows the pool may end early, and it says so.
        assert loop.finished[name].finish_reason == FinishReason.LENGTH
        needed = arrival.num_prompt_tokens + arrival.max_tokens
        held = (settings_["num_blocks"] - 1) * settings_["block_size"]
        if layout == "full":
            assert needed > held
        else:
            assert needed * 2 + settings_["max_num_batched_tokens"] > held


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(engine=engines(), trace=st.lists(arrivals, min_size=1, max_size=9))
def test_any_trace_in_any_pool_ends_as_in_a_huge_one(layout, engine, trace):
    loop = play(engine, layout, trace)
    huge = {
        "block_size": 4,
        "num_blocks": 2000,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
    }
    reference = play(huge, layout, [replace(arrival, abort_at=None) for arrival in trace])
    check_outcome(loop, reference, engine, layout, trace)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompt_that_loses_its_blocks_within_a_step_finds_no_uncomputed_ones_later(layout):
    """A long prompt in pieces of several blocks runs first, and is evicted by an urgent request
    after a piece of it has been scheduled; few enough blocks are taken that some are hit again."""
    rng = random.Random(0)
    for _ in range(300):
        length = rng.randint(24, 50)
        engine = {
            "block_size": 4,
            "num_blocks": length // 4 + rng.randint(2, 3),
            "max_num_batched_tokens": 64,
            "policy": "priority",
            "long_prefill_token_threshold": rng.choice([8, 12, 16]),
            "scheduler_reserve_full_isl": False,
            "async_scheduling": rng.random() < 0.5,
        }
        trace = [Arrival(0, 0, 0, length, 2, 2, None, False)]
        for _ in range(rng.randint(1, 2)):
            own, max_tokens = rng.randint(1, 8), rng.randint(2, 8)
            trace.append(Arrival(rng.randint(1, 2), 1, 0, own, max_tokens, 0, None, False))
        loop = play(engine, layout, trace)
        for index, arrival in enumerate(trace):
            start = arrival.num_prompt_tokens
            expected = [3 + p % 97 for p in range(start, start + arrival.max_tokens)]
            got = loop.tokens[f"r{index}"]
            # Only with a second group can it outgrow the pool.
            assert got == (expected if layout == "full" else expected[: len(got)])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_preempted_requests_that_hit_their_own_blocks_stay_in_bounds(async_scheduling):
    """64 requests with a common prefix of 40 tokens in a pool of 24 blocks of 16, many times."""
    for seed in range(8):
        rng = random.Random(seed)
        engine = {
            "block_size": 16,
            "num_blocks": 24,
            "max_num_seqs": rng.choice([4, 8, 16]),
            "max_num_batched_tokens": rng.choice([16, 48, 256]),
            "scheduler_reserve_full_isl": rng.random() < 0.5,
            "policy": rng.choice(["fcfs", "priority"]),
            "async_scheduling": async_scheduling,
        }
        config = make_config(max_model_len=256, **engine)
        loop = Loop(config)
        lengths = {}
        for i in range(64):
            own = rng.randint(10, 80)
            lengths[f"r{i}"] = 40 + own
            prompt = [*range(40), *range(1000 * (i + 1), 1000 * (i + 1) + own)]
            loop.add(
                make_request(
                    f"r{i}", prompt, 30, block_size=16, priority=rng.randint(0, 2), arrival_time=i
                )
            )
        loop.run(max_steps=20_000)
        for name, length in lengths.items():
            assert loop.tokens[name] == [3 + p % 97 for p in range(length, length + 30)]
