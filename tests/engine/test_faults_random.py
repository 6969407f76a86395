# SPDX-License-Identifier: Apache-2.0
"""Ten thousand additions and aborts in any order: no hang, no output lost or doubled, and in the
end every block is back in the pool."""

import asyncio

import pytest
from engine_helpers import make_config, make_core
from process_helpers import make_mp_client, run
from request_ledger import Ledger

NUM_OPERATIONS = 10_000
MAX_MODEL_LEN = 96

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_random_additions_and_aborts_in_process(async_scheduling, policy):
    # A pool for about three requests, so that some are preempted all the time.
    config = make_config(
        num_blocks=64,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=6,
        async_scheduling=async_scheduling,
        policy=policy,
    )
    core = make_core(config)
    ledger = Ledger(seed=11, late=False)
    rng = ledger.rng

    def step():
        outputs, _ = core.step_fn()
        for client_outputs in outputs.values():
            ledger.take(client_outputs.outputs)

    for operation in range(NUM_OPERATIONS):
        if rng.random() < 0.65 and len(ledger.open) < 40:
            core.add_request(*core.preprocess_add_request(ledger.new_request(operation)))
        else:
            core.abort_requests(ledger.names_to_abort())
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            step()
    for _ in range(2000):
        if not core.scheduler.has_requests() and not core.batch_queue:
            break
        step()
    ledger.check_all_answered()
    assert sum(core.scheduler.get_request_counts()) == 0 and not core.scheduler.requests
    manager = core.scheduler.kv_cache_manager
    assert manager.block_pool.get_num_free_blocks() == manager.block_pool.num_gpu_blocks - 1
    assert all(block.ref_cnt == 0 for block in manager.block_pool.blocks if not block.is_null)
    assert core.reset_prefix_cache()
    assert not core.model_executor.driver_worker.model_runner.rows
    core.shutdown()


def test_random_additions_and_aborts_across_processes():
    client = make_mp_client(
        True, num_blocks=64, max_model_len=MAX_MODEL_LEN, max_num_seqs=6, async_scheduling=True
    )
    ledger = Ledger(seed=12, late=True)
    rng = ledger.rng

    async def read():
        while True:
            ledger.take((await client.get_output_async()).outputs)

    async def main():
        reading = asyncio.create_task(read())
        for operation in range(NUM_OPERATIONS):
            if rng.random() < 0.8:
                await client.add_request_async(ledger.new_request(operation))
            else:
                await client.abort_requests_async(ledger.names_to_abort())
            while len(ledger.open) > 15 or rng.random() < 0.1:
                await asyncio.sleep(0.001)
                assert not reading.done(), reading.exception()
        while ledger.open:
            await asyncio.sleep(0.01)
            assert not reading.done(), reading.exception()
        reading.cancel()
        assert await client.reset_prefix_cache_async()  # no block is held any more

    run(main())
    ledger.check_all_answered()
    client.shutdown()
