# SPDX-License-Identifier: Apache-2.0
"""cache.mamba_cache_mode=align: a prompt's steps end where a recurrent state is kept."""

from __future__ import annotations

from typing import Any

import pytest
from engine_helpers import full_spec, make_config, make_request, make_scheduler, run_model

from vllmx.core.kv_cache_interface import MambaSpec
from vllmx.core.scheduler import Scheduler
from vllmx.exceptions import UserError

BLOCK = 4


def state_spec(block_size: int = BLOCK, mode: str = "align") -> MambaSpec:
    return MambaSpec(block_size, ((2 * block_size,),), ("float32",), mamba_cache_mode=mode)


def align_scheduler(specs: list[Any] | None = None, **limits: Any) -> Scheduler:
    config = make_config(block_size=BLOCK, **limits)
    config.cache_config.mamba_cache_mode = "align"
    return make_scheduler(config, specs or [full_spec(BLOCK), state_spec()])


def run(scheduler: Scheduler, max_steps: int = 200) -> dict[str, list[int]]:
    """Step to the end; the tokens of each request in each of its steps."""
    pieces: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not scheduler.has_requests():
            return pieces
        output = scheduler.schedule()
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            pieces.setdefault(req_id, []).append(num_tokens)
        complete = {
            req_id: [7]
            for req_id in output.num_scheduled_tokens
            if not scheduler.requests[req_id].is_prefill_chunk
        }
        scheduler.update_from_output(output, run_model(output, complete))
    raise AssertionError("still busy")


def test_pieces_end_at_block_ends_and_the_tail_goes_alone():
    scheduler = align_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 22, max_tokens=3))
    assert run(scheduler) == {"a": [8, 8, 4, 2, 1, 1]}


def test_a_prompt_of_whole_blocks_has_no_tail():
    scheduler = align_scheduler()
    scheduler.add_request(make_request("a", 12, max_tokens=1))
    scheduler.add_request(make_request("b", 3, max_tokens=1))
    assert run(scheduler) == {"a": [12], "b": [3]}


def test_a_budget_too_small_for_a_block_is_left_to_others():
    scheduler = align_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 8, max_tokens=8))
    scheduler.add_request(make_request("b", 12, max_tokens=1))
    # The two tokens beside a's eight fill no block, so b waits a step.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 8}


def test_the_last_state_of_a_prompt_is_hit_and_no_other():
    scheduler = align_scheduler()
    prompt = list(range(22))
    scheduler.add_request(make_request("a", prompt, max_tokens=1))
    run(scheduler)
    scheduler.add_request(make_request("b", [*prompt, 50, 51, 52], max_tokens=1))
    # 20 tokens are hit; one whole block and a tail of one are left.
    assert run(scheduler) == {"b": [4, 1]}
    scheduler.add_request(make_request("c", [*prompt[:16], 60, 61], max_tokens=1))
    # Attention has 16 tokens of it, the states end at 20 and 24: the common part gets a step.
    assert run(scheduler) == {"c": [16, 2]}
    scheduler.add_request(make_request("d", [*prompt[:16], 70, 71], max_tokens=1))
    assert run(scheduler) == {"d": [2]}


def test_all_blocks_come_back_after_preemptions():
    scheduler = align_scheduler(num_blocks=26, max_model_len=64, max_num_batched_tokens=16)
    for i in range(6):
        scheduler.add_request(make_request(f"r{i}", 10 + 5 * i, max_tokens=12))
    run(scheduler)
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    for manager in scheduler.kv_cache_manager.coordinator.single_type_managers:
        assert not manager.req_to_blocks
    assert not manager.last_state_block_idx and not manager._allocated_block_reqs


def test_other_modes_do_not_cut():
    config = make_config(block_size=BLOCK, max_num_batched_tokens=10)
    scheduler = make_scheduler(config, [full_spec(BLOCK), state_spec(mode="none")])
    scheduler.add_request(make_request("a", 22, max_tokens=1))
    assert run(scheduler) == {"a": [10, 10, 2]}


@pytest.mark.parametrize(
    ("specs", "limits", "message"),
    [
        ([state_spec(mode="none")], {}, "layers.1 keeps its states in mode none"),
        ([state_spec(8)], {}, "layers.1 keeps a state every 8 tokens"),
        ([], {"max_num_batched_tokens": 3}, "scheduler.max_num_batched_tokens=3 must be at least"),
        (
            [],
            {"long_prefill_token_threshold": 2},
            "scheduler.long_prefill_token_threshold=2 must be at least",
        ),
    ],
)
def test_what_cannot_be_cut_at_block_ends_is_refused(specs, limits, message):
    with pytest.raises(UserError, match=r"^cache\.mamba_cache_mode=align: ") as error:
        align_scheduler([full_spec(BLOCK), *(specs or [state_spec()])], **limits)
    assert message in str(error.value)


def test_a_drafter_of_attention_takes_a_block_less():
    scheduler = align_scheduler()
    scheduler.use_eagle = True
    request = make_request("a", 22)
    assert scheduler._mamba_block_aligned_split(request, 22) == 16
