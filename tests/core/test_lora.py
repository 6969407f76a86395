# SPDX-License-Identifier: Apache-2.0
import msgspec
import pytest
from engine_helpers import make_config, make_core, make_request, make_scheduler, run_model

from vllmx.config import LoRAConfig, RunConfig, finalize
from vllmx.core.block_hash import get_request_block_hasher, sha256_cbor
from vllmx.core.kv_events import BlockStored
from vllmx.exceptions import UserError
from vllmx.lora.request import LoRARequest
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams


def adapter(number):
    return LoRARequest(f"adapter{number}", number, f"/adapters/{number}")


def request(name, lora=None, num_tokens=4, salt=None):
    made = make_request(name, num_tokens, max_tokens=10)
    return Request(
        name,
        made.prompt_token_ids,
        SamplingParams(max_tokens=10),
        None,
        lora_request=lora,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(4, sha256_cbor),
        hash_block_size=4,
    )


def scheduler_with(max_loras, **settings):
    config = make_config(**settings)
    config.lora_config = LoRAConfig(enable_lora=True, max_loras=max_loras)
    return make_scheduler(config)


def step(scheduler):
    output = scheduler.schedule()
    tokens = {req_id: [7] for req_id in output.num_scheduled_tokens}
    scheduler.update_from_output(output, run_model(output, tokens))
    return list(output.num_scheduled_tokens)


def test_a_step_has_no_more_adapters_than_max_loras_and_others_pass():
    scheduler = scheduler_with(2)
    for name, number in [("a", 1), ("b", 2), ("c", 3), ("d", 1), ("free", None)]:
        scheduler.add_request(request(name, number and adapter(number)))
    assert step(scheduler) == ["a", "b", "d", "free"]
    assert scheduler.make_stats().num_skipped_waiting_reqs == 1
    assert step(scheduler) == ["a", "b", "d", "free"]
    # c goes as soon as no request with adapter 2 runs, and before those that came later.
    scheduler.finish_requests("b", 7)
    scheduler.add_request(request("late", adapter(4)))
    assert step(scheduler) == ["a", "d", "free", "c"]
    assert [new.request_id for new in scheduler.skipped_waiting] == ["late"]


def test_without_a_limit_nothing_is_asked_of_adapters():
    scheduler = make_scheduler(make_config())
    for number in (1, 2, 3):
        scheduler.add_request(request(f"r{number}", adapter(number)))
    assert len(step(scheduler)) == 3


def test_the_runner_gets_the_adapter_with_the_request():
    scheduler = scheduler_with(1)
    scheduler.add_request(request("a", adapter(1)))
    assert scheduler.schedule().scheduled_new_reqs[0].lora_request == adapter(1)


def test_blocks_are_shared_within_an_adapter_only_and_a_salt_cannot_imitate_one():
    hashes = [
        request("same", lora, 8, salt).block_hashes
        for lora, salt in [
            *((None, None), (adapter(1), None), (adapter(2), None)),
            *((None, "adapter1"), (adapter(1), "salt")),
        ]
    ]
    for block in range(2):
        assert len({h[block] for h in hashes}) == 5
    assert request("same", adapter(1), 8).block_hashes == hashes[1]


def test_kv_events_name_the_adapter():
    scheduler = scheduler_with(1)
    pool = scheduler.kv_cache_manager.block_pool
    pool.enable_kv_cache_events = True
    for lora in (adapter(5), None):
        scheduler.add_request(request("with" if lora else "without", lora))
        scheduler.schedule()
        (event,) = pool.take_events()
        assert isinstance(event, BlockStored)
        assert (event.lora_id, event.lora_name) == ((5, "adapter5") if lora else (None, None))


def test_lora_request_checks_itself_and_is_known_by_its_name():
    with pytest.raises(ValueError, match="id must be > 0"):
        LoRARequest("a", 0, "/a")
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("a", 1)
    lora = adapter(3)
    assert (lora.adapter_id, lora.name, lora.path) == (3, "adapter3", "/adapters/3")
    assert lora == LoRARequest("adapter3", 9, "/elsewhere") and lora != adapter(4)
    assert len({lora, adapter(3)}) == 1
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(lora), type=LoRARequest)
    assert (again.lora_int_id, again.lora_path) == (3, "/adapters/3")


def test_config_makes_a_limit_only_if_adapters_are_enabled():
    run = RunConfig()
    run.lora.max_loras = 4
    assert finalize(run).lora_config is None
    run.lora.enable_lora = True
    assert finalize(run).lora_config.max_loras == 4
    run.lora.max_cpu_loras = 2
    with pytest.raises(UserError, match=r"max_cpu_loras \(2\) must be >= max_loras \(4\)"):
        finalize(run)


def test_a_worker_that_cannot_apply_adapters_refuses_by_name():
    config = make_config()
    config.lora_config = LoRAConfig(enable_lora=True)
    with pytest.raises(UserError, match="NullWorker cannot apply adapters"):
        make_core(config)
