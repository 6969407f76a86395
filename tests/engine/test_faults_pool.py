# SPDX-License-Identifier: Apache-2.0
"""The KV pool has no room left: requests wait or are preempted, none is lost, nobody hangs."""

import pytest
from engine_helpers import make_config, make_core, make_engine_request
from process_helpers import collect, make_mp_client, run

from vllmx.engine import FinishReason

pytestmark = pytest.mark.timeout(60)


def step_until_idle(core, max_steps=5000):
    """Tokens and reasons by request, and how often one was preempted."""
    tokens, reasons, preemptions = {}, {}, 0
    schedule = core.scheduler.schedule

    def counting(*args, **kwargs):
        nonlocal preemptions
        scheduler_output = schedule(*args, **kwargs)
        preemptions += len(scheduler_output.preempted_req_ids or ())
        return scheduler_output

    core.scheduler.schedule = counting
    for _ in range(max_steps):
        if not core.scheduler.has_requests() and not core.batch_queue:
            return tokens, reasons, preemptions
        for client_outputs in core.step_fn()[0].values():
            for output in client_outputs.outputs:
                assert output.request_id not in reasons, "output after the last one"
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finished:
                    reasons[output.request_id] = output.finish_reason
    raise AssertionError(f"still busy after {max_steps} steps")


def add(core, *args, **kwargs):
    core.add_request(*core.preprocess_add_request(make_engine_request(*args, **kwargs)))


def assert_all_blocks_are_back(core):
    pool = core.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert core.reset_prefix_cache()


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_requests_for_ten_times_the_pool_all_get_their_tokens(policy, async_scheduling, caching):
    # 16 blocks of 4: two of these requests at their end, all six at their begin.
    core = make_core(
        make_config(
            num_blocks=17,
            max_model_len=64,
            max_num_seqs=6,
            caching=caching,
            async_scheduling=async_scheduling,
            policy=policy,
        )
    )
    for i in range(24):
        add(core, f"r{i}", 8, max_tokens=20)
    tokens, reasons, preemptions = step_until_idle(core)
    assert tokens == {f"r{i}": [3 + p for p in range(8, 28)] for i in range(24)}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert preemptions > 0
    assert_all_blocks_are_back(core)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_request_may_take_the_whole_pool(async_scheduling):
    config = make_config(num_blocks=17, max_model_len=64, async_scheduling=async_scheduling)
    core = make_core(config)
    for name in "ab":
        add(core, name, 32, max_tokens=32)
    tokens, reasons, _ = step_until_idle(core)
    assert {name: len(got) for name, got in tokens.items()} == {"a": 32, "b": 32}
    assert set(reasons.values()) == {FinishReason.LENGTH}
    assert_all_blocks_are_back(core)


def test_abort_of_who_holds_the_pool_lets_the_next_one_in():
    core = make_core(make_config(num_blocks=17, max_model_len=64))
    add(core, "holder", 56, max_tokens=8)
    add(core, "waiter", 56, max_tokens=8)
    core.step()
    assert core.scheduler.get_request_counts() == (1, 1)
    core.abort_requests(["holder"])
    _, reasons, _ = step_until_idle(core)
    assert reasons == {"waiter": FinishReason.LENGTH}
    assert_all_blocks_are_back(core)


def test_pool_exhausted_in_another_process_loses_nothing():
    client = make_mp_client(True, num_blocks=17, max_model_len=64, max_num_seqs=6)

    async def main():
        names = {f"r{i}" for i in range(24)}
        for name in sorted(names):
            await client.add_request_async(make_engine_request(name, 8, max_tokens=20))
        tokens, reasons = await collect(client, names)
        assert all(got == [3 + p for p in range(8, 28)] for got in tokens.values())
        assert set(reasons.values()) == {FinishReason.LENGTH}
        assert await client.reset_prefix_cache_async()  # no block is held any more

    run(main())
    client.shutdown()
