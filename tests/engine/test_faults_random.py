# SPDX-License-Identifier: Apache-2.0
"""Ten thousand additions and aborts in any order: no hang, no output lost or doubled, and in the
end every block is back in the pool."""

import asyncio
import random
from dataclasses import dataclass, field

import pytest
from engine_helpers import make_config, make_core, make_engine_request
from process_helpers import make_mp_client, run

from vllmx.engine import FinishReason
from vllmx.worker.null_runner import cyclic_script

NUM_OPERATIONS = 10_000
SHARED = list(range(500, 530))
MAX_MODEL_LEN = 96

pytestmark = pytest.mark.timeout(120)


@dataclass
class Asked:
    """A request and what has come of it."""

    prompt_len: int
    max_tokens: int
    aborted: bool = False
    tokens: list[int] = field(default_factory=list)
    reason: FinishReason | None = None


class Ledger:
    """Makes requests and checks every output against what was asked for.

    `late`: outputs may still arrive for a request whose abort is on its way.
    """

    def __init__(self, seed: int, late: bool) -> None:
        self.rng = random.Random(seed)
        self.late = late
        self.asked: dict[str, Asked] = {}
        self.open: list[str] = []

    def new_request(self, operation: int):
        """The next request: a prompt of its own, or one that begins like others."""
        rng = self.rng
        name = f"r{operation}"
        own = [1000 + operation] * rng.randint(1, 30)
        prompt = SHARED[: rng.randint(4, 30)] + own if rng.random() < 0.4 else own
        max_tokens = rng.choice([1, 2, 5, 15, 30])
        self.asked[name] = Asked(len(prompt), max_tokens)
        self.open.append(name)
        request = make_engine_request(name, prompt, max_tokens)
        request.priority = rng.randint(0, 3)
        return request

    def names_to_abort(self) -> list[str]:
        """Living requests, one that has ended, one that never was."""
        rng = self.rng
        names = rng.sample(self.open, min(len(self.open), rng.choice([1, 1, 1, 2, 5])))
        for name in names:
            self.open.remove(name)
            self.asked[name].aborted = True
        ended = rng.choice(list(self.asked)) if self.asked and rng.random() < 0.1 else None
        if ended is not None and self.asked[ended].reason is not None:
            names.append(ended)
        return [*names, "unknown"]

    def take(self, outputs) -> None:
        """Check the outputs of a step."""
        for output in outputs:
            asked = self.asked[output.request_id]
            assert asked.reason is None, f"{output.request_id}: output after the last one"
            assert self.late or not asked.aborted, f"{output.request_id}: output after its abort"
            for token in output.new_token_ids:
                position = asked.prompt_len + len(asked.tokens)
                assert token == cyclic_script(output.request_id, position), output.request_id
                asked.tokens.append(token)
            if output.finished:
                asked.reason = output.finish_reason
                if output.request_id in self.open:
                    self.open.remove(output.request_id)

    def check_all_answered(self) -> None:
        """Every request that was not aborted has all its tokens."""
        assert not self.open
        for name, asked in self.asked.items():
            if not asked.aborted:
                assert asked.reason == FinishReason.LENGTH, name
                assert len(asked.tokens) == asked.max_tokens, name
        aborted = [asked for asked in self.asked.values() if asked.aborted]
        assert len(self.asked) // 20 < len(aborted) < len(self.asked) * 19 // 20  # both were tried


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
