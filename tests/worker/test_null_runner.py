# SPDX-License-Identifier: Apache-2.0
"""The checked null runner is only worth something if it notices what it is there for."""

from dataclasses import replace

import pytest
from engine_helpers import make_config, make_request, make_scheduler

from vllmx.core.output import EMPTY_MODEL_RUNNER_OUTPUT, SchedulerOutput
from vllmx.worker.null_runner import NullModelRunner, NullWorker


def start(num_prompt_tokens=6, num_requests=2):
    config = make_config()
    scheduler = make_scheduler(config)
    runner = NullModelRunner(config, check=True)
    runner.initialize_kv_cache(scheduler.kv_cache_config)
    for i in range(num_requests):
        scheduler.add_request(make_request(f"r{i}", num_prompt_tokens, max_tokens=9))
    return scheduler, runner


def advance(scheduler, runner):
    output = scheduler.schedule()
    runner.execute_model(output)
    scheduler.update_from_output(output, runner.sample_tokens(None))


def test_empty_step_needs_no_sampling_and_drops_what_ended():
    scheduler, runner = start()
    advance(scheduler, runner)
    output = replace(SchedulerOutput.make_empty(), finished_req_ids={"r0", "unknown"})
    assert runner.execute_model(output) is EMPTY_MODEL_RUNNER_OUTPUT
    assert set(runner.rows) == {"r1"} and runner.num_steps == 1


def test_table_that_is_too_short_is_noticed():
    scheduler, runner = start()
    output = scheduler.schedule()
    output.scheduled_new_reqs[0].block_ids[0].pop()
    with pytest.raises(AssertionError, match="too few blocks"):
        runner.execute_model(output)


def test_slot_written_by_two_requests_is_noticed():
    scheduler, runner = start()
    output = scheduler.schedule()
    first, second = output.scheduled_new_reqs
    second.block_ids[0][:] = first.block_ids[0]
    with pytest.raises(AssertionError, match="slot written twice"):
        runner.execute_model(output)


def test_prefix_of_another_request_is_noticed():
    scheduler, runner = start()
    advance(scheduler, runner)
    first, second = (runner.rows[name] for name in ("r0", "r1"))
    second.block_ids[0][0] = first.block_ids[0][0]
    with pytest.raises(AssertionError, match="r1: position 0 reads what another prefix wrote"):
        runner.execute_model(scheduler.schedule())


def test_null_block_is_never_written():
    scheduler, runner = start()
    output = scheduler.schedule()
    output.scheduled_new_reqs[0].block_ids[0][1] = 0
    with pytest.raises(AssertionError, match="r0: block 0"):
        runner.execute_model(output)


def test_step_over_the_budget_or_past_the_known_tokens_is_noticed():
    scheduler, runner = start()
    output = scheduler.schedule()
    with pytest.raises(AssertionError):
        runner.execute_model(replace(output, total_num_scheduled_tokens=99))
    scheduler, runner = start()
    output = scheduler.schedule()
    output.num_scheduled_tokens["r0"] += 1
    with pytest.raises(AssertionError, match="r0"):
        runner.execute_model(replace(output, total_num_scheduled_tokens=13))


def test_execute_and_sample_alternate():
    scheduler, runner = start()
    with pytest.raises(AssertionError, match="execute_model was not called"):
        runner.sample_tokens(None)
    runner.execute_model(scheduler.schedule())
    with pytest.raises(AssertionError, match="sample_tokens was not called"):
        runner.execute_model(scheduler.schedule())


def test_script_decides_the_tokens_by_request_and_position():
    config = make_config()
    worker = NullWorker(config, script=lambda req_id, position: 100 * int(req_id[1]) + position)
    scheduler = make_scheduler(config)
    for i in range(2):
        scheduler.add_request(make_request(f"r{i}", 4 + i))
    tokens = []
    for _ in range(2):
        output = scheduler.schedule()
        assert worker.execute_model(output) is None
        result = worker.sample_tokens(None)
        tokens.append([list(ids) for ids in result.sampled_token_ids])
        scheduler.update_from_output(output, result)
    assert tokens == [[[4], [105]], [[5], [106]]]
