# SPDX-License-Identifier: Apache-2.0
"""The engine core's loop, turned by hand: many aborts at once; pauses and resets at any time."""

import contextlib
import random
from functools import partial

import pytest
from engine_helpers import make_config, make_engine_request
from request_ledger import Ledger

from vllmx.engine import EngineCoreRequestType
from vllmx.engine.core_loop import EngineCoreLoop
from vllmx.engine.executor import UniProcExecutor
from vllmx.worker.null_runner import NullWorker

pytestmark = pytest.mark.timeout(60)

ADD, ABORT, UTILITY = (
    EngineCoreRequestType.ADD,
    EngineCoreRequestType.ABORT,
    EngineCoreRequestType.UTILITY,
)


class Idle(Exception):
    """The loop would wait for a message."""


class HandTurnedLoop(EngineCoreLoop):
    """Does what run_busy_loop does, a turn at a time and without waiting."""

    def __init__(self, **settings):
        config = make_config(**{"max_model_len": 96, **settings})
        config.parallel_config.worker_cls = partial(NullWorker, check=True)
        self.sent = []
        super().__init__(
            config, UniProcExecutor, True, lambda _, outputs: self.sent.append(outputs)
        )

    def put_request(self, request):
        self.input_queue.put((ADD, self.preprocess_add_request(request)[0]))

    def call(self, call_id, method, *args):
        self.input_queue.put((UTILITY, (0, call_id, method, args)))

    def _next_message(self, block):
        message = super()._next_message(block=False)
        if message is None and block:
            raise Idle
        return message

    def turn(self):
        """One turn; returns the outputs that it sent."""
        with contextlib.suppress(Idle):
            self._process_input_queue()
            self._process_engine_step()
        sent, self.sent = self.sent, []
        return sent

    def assert_nothing_is_held(self):
        assert not self.scheduler.requests
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert not self.model_executor.driver_worker.model_runner.rows


@pytest.mark.parametrize("within_a_step", [False, True])
def test_aborts_that_came_together_are_one_walk_over_the_requests(within_a_step, monkeypatch):
    loop = HandTurnedLoop()
    for i in range(60):
        loop.put_request(make_engine_request(f"r{i}", max_tokens=50))
    loop.turn()
    walks = []
    monkeypatch.setattr(loop, "abort_requests", walks.append)

    def leave():
        for i in range(50):
            loop.input_queue.put((ABORT, [f"r{i}"]))
        loop.put_request(make_engine_request("new"))
        loop.input_queue.put((ABORT, ["new"]))  # not before it has been added

    if within_a_step:
        execute = loop.model_executor.execute_model

        def execute_while_they_leave(scheduler_output):
            leave()
            return execute(scheduler_output)

        monkeypatch.setattr(loop.model_executor, "execute_model", execute_while_they_leave)
        loop.turn()
        monkeypatch.setattr(loop.model_executor, "execute_model", execute)
        assert walks == [[f"r{i}" for i in range(50)]] and "new" not in loop.scheduler.requests
    else:
        leave()
    loop.turn()
    assert walks == [[f"r{i}" for i in range(50)], ["new"]] and "new" in loop.scheduler.requests
    loop.shutdown()


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_pauses_and_resets_at_any_time_lose_nothing(seed, async_scheduling):
    rng = random.Random(seed)
    loop = HandTurnedLoop(
        num_blocks=rng.choice([30, 64, 200]),
        max_num_seqs=rng.choice([2, 6]),
        max_num_batched_tokens=rng.choice([9, 32, 64]),
        caching=rng.random() < 0.7,
        policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=async_scheduling,
    )
    ledger = Ledger(seed, late=True)
    answers = {}

    def turn():
        for outputs in loop.turn():
            ledger.take(outputs.outputs)
            if (answer := outputs.utility_output) is not None:
                assert answer.call_id not in answers, "answered twice"
                answers[answer.call_id] = answer.failure_message

    calls, paused = 0, False
    for operation in range(300):
        dice = rng.random()
        if dice < 0.5 and len(ledger.open) < 25:
            loop.put_request(ledger.new_request(operation))
        elif dice < 0.65:
            loop.input_queue.put((ABORT, ledger.names_to_abort()))
        elif dice < 0.8:
            calls += 1
            loop.call(calls, "reset_prefix_cache", rng.random() < 0.5)
        elif dice < 0.9:
            calls += 1
            if paused:
                loop.call(calls, "resume_scheduler")
            else:
                mode = rng.choice(["keep", "wait"])
                loop.call(calls, "pause_scheduler", mode, rng.random() < 0.5)
            paused = not paused
        for _ in range(rng.choice([0, 1, 1, 2, 5])):
            turn()
    loop.call(0, "resume_scheduler")
    for _ in range(2000):
        turn()
        if not loop.has_work():
            break
    turn()  # calls that wait for an idle engine are answered
    ledger.check_all_answered()
    assert answers == dict.fromkeys(range(calls + 1))
    loop.assert_nothing_is_held()
    loop.shutdown()
