# SPDX-License-Identifier: Apache-2.0
from engine_helpers import make_config, make_request, make_scheduler, run_model


def step(scheduler, throttle=False, **tokens):
    output = scheduler.schedule(throttle_prefills=throttle)
    complete = {
        req_id: tokens.get(req_id, [7])
        for req_id in output.num_scheduled_tokens
        if not scheduler.requests[req_id].is_prefill_chunk
    }
    scheduler.update_from_output(output, run_model(output, complete))
    return output.num_scheduled_tokens


def decoding(**settings):
    scheduler = make_scheduler(make_config(**settings))
    scheduler.add_request(make_request("decode", 4, max_tokens=20))
    step(scheduler)
    return scheduler


def test_prompts_wait_while_decodes_run_and_come_in_a_later_step():
    scheduler = decoding()
    scheduler.add_request(make_request("new"))
    assert step(scheduler, throttle=True) == {"decode": 1}
    assert step(scheduler) == {"decode": 1, "new": 8}


def test_prompts_come_in_where_there_is_no_decode_to_protect():
    scheduler = make_scheduler(make_config(max_num_batched_tokens=16))
    scheduler.add_request(make_request("new", 20))
    assert step(scheduler, throttle=True) == {"new": 16}
    assert step(scheduler, throttle=True) == {"new": 4}


def test_the_rest_of_a_prompt_waits_as_well_even_its_last_token():
    for num_tokens in (20, 16):
        scheduler = decoding(max_num_batched_tokens=16)
        scheduler.add_request(make_request("long", num_tokens))
        assert step(scheduler) == {"decode": 1, "long": 15}
        assert step(scheduler, throttle=True) == {"decode": 1}
        assert step(scheduler) == {"decode": 1, "long": num_tokens - 15}


def test_a_prompt_that_is_cached_but_for_one_token_is_a_decode():
    scheduler = make_scheduler(make_config())
    prompt = list(range(9))
    scheduler.add_request(make_request("decode", prompt, max_tokens=20))
    step(scheduler)
    scheduler.add_request(make_request("hit", prompt))
    assert step(scheduler, throttle=True) == {"decode": 1, "hit": 1}


def test_nothing_is_put_off_after_a_step_that_left_prompts_for_want_of_room():
    scheduler = decoding(max_num_batched_tokens=9)
    for name in "ab":
        scheduler.add_request(make_request(name))
    assert step(scheduler) == {"decode": 1, "a": 8}
    assert scheduler.prefill_capacity_bound
    assert step(scheduler, throttle=True) == {"decode": 1, "a": 1, "b": 7}
    assert not scheduler.prefill_capacity_bound
    assert step(scheduler, throttle=True) == {"decode": 1, "a": 1}
