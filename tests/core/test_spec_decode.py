# SPDX-License-Identifier: Apache-2.0
import random

import pytest
from engine_helpers import (
    Loop,
    make_config,
    make_core,
    make_engine_request,
    make_request,
    run_model,
)
from engine_helpers import make_scheduler as make_plain_scheduler

from vllmx.config import RunConfig, SpeculativeConfig, finalize
from vllmx.core.output import DraftTokenIds
from vllmx.core.spec_decode import build_dynamic_sd_schedule_lookup
from vllmx.engine.core import EngineCore
from vllmx.engine.executor import UniProcExecutor
from vllmx.exceptions import UserError
from vllmx.worker.null_runner import NullModelRunner, NullWorker


class DraftingRunner(NullModelRunner):
    """Drafts the script's tokens, about a third of them wrong, and verifies what is scheduled."""

    def __init__(self, config, **settings):
        super().__init__(config, **settings)
        self.num_drafts = config.num_speculative_tokens
        self.use_async = bool(config.scheduler_config.async_scheduling)
        self.verified: dict[str, list[int]] = {}
        self.drafts: DraftTokenIds | None = None

    def draft(self, req_id: str, position: int) -> int:
        token = self.script(req_id, position)
        return token if hash((position, len(req_id))) % 3 else token + 1

    def execute_model(self, scheduler_output):
        self.verified = scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output)

    def _check(self, scheduler_output, kv_cache):
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            if self.use_async:
                # Planned before it was known which drafts were right.
                assert self.rows[req_id].num_computed_tokens <= cached.num_computed_tokens[i]
                cached.num_computed_tokens[i] = self.rows[req_id].num_computed_tokens
        for req_id, drafts in self.verified.items():
            row = self.rows[req_id]
            if self.use_async:
                own = [self.draft(req_id, row.num_tokens + i) for i in range(len(drafts))]
                self.verified[req_id] = drafts = own
            row.token_ids += drafts
            row.num_tokens += len(drafts)
        super()._check(scheduler_output, kv_cache)

    def sample_tokens(self, grammar_output):
        scheduled, self._scheduled = self._scheduled, None
        sampled = {}
        for req_id, num_tokens in scheduled.items():
            row = self.rows[req_id]
            row.num_computed_tokens += num_tokens
            if row.num_computed_tokens < row.num_tokens:
                sampled[req_id] = []
                continue
            drafts = self.verified.get(req_id, [])
            del row.token_ids[row.num_tokens - len(drafts) :]
            for draft in [*drafts, None]:
                token = self.script(req_id, len(row.token_ids))
                row.token_ids.append(token)
                sampled.setdefault(req_id, []).append(token)
                if draft != token:
                    break
            row.num_tokens = len(row.token_ids)
            row.num_computed_tokens = row.num_tokens - 1
        self.drafts = DraftTokenIds(
            [req_id for req_id, tokens in sampled.items() if tokens],
            [
                [
                    self.draft(req_id, self.rows[req_id].num_tokens + i)
                    for i in range(self.num_drafts)
                ]
                for req_id, tokens in sampled.items()
                if tokens
            ],
        )
        req_ids = list(scheduled)
        output = run_model(_Scheduled(scheduled), sampled)
        assert output.req_ids == req_ids
        return output

    def take_draft_token_ids(self):
        drafts, self.drafts = self.drafts, None
        return drafts


class _Scheduled:
    def __init__(self, num_scheduled_tokens):
        self.num_scheduled_tokens = num_scheduled_tokens


class DraftingWorker(NullWorker):
    def __init__(self, vllm_config):
        super().__init__(vllm_config)
        self.model_runner = DraftingRunner(vllm_config, check=True)
        self.execute_model = self.model_runner.execute_model
        self.sample_tokens = self.model_runner.sample_tokens
        self.take_draft_token_ids = self.model_runner.take_draft_token_ids


class SpecLoop(Loop):
    def __init__(self, config):
        super().__init__(config)
        self.runner = DraftingRunner(config, check=True)
        self.runner.initialize_kv_cache(self.scheduler.kv_cache_config)

    def step(self, between=lambda: None):
        output = super().step(between)
        if self.depth == 1 and output is not None and output.total_num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())
        return output


def spec_config(num_speculative_tokens=3, method="ngram", per_batch_size=None, **settings):
    config = make_config(**settings)
    config.speculative_config = SpeculativeConfig(
        num_speculative_tokens,
        model=None if method == "ngram" else "drafter",
        method=method,
        num_speculative_tokens_per_batch_size=per_batch_size,
    )
    return config


def make_scheduler(**settings):
    return make_plain_scheduler(spec_config(**settings))


def decode(scheduler, *names):
    """Bring requests of these names to their first decode."""
    for name in names:
        scheduler.add_request(make_request(name, 4, max_tokens=20))
    output = scheduler.schedule()
    scheduler.update_from_output(output, run_model(output, {name: [7] for name in names}))


# ---------------------------------------------------------------- drafts, accepted and rejected


def test_drafts_are_scheduled_and_the_rejected_are_taken_off_again():
    scheduler = make_scheduler()
    decode(scheduler, "a", "b")
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "b", "gone"], [[1, 2, 3], [], [9]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4, "b": 1}
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2, 3]}
    assert scheduler.requests["a"].num_computed_tokens == 8
    outputs = scheduler.update_from_output(output, run_model(output, {"a": [1, 5], "b": [7]}))
    # One draft of three was right: it and the token after the first wrong one are new.
    assert [o.new_token_ids for o in outputs[0].outputs] == [[1, 5], [7]]
    request = scheduler.requests["a"]
    assert (request.num_computed_tokens, request.num_tokens) == (6, 7)
    stats = outputs[0].scheduler_stats.spec_decoding_stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (1, 3, 1)
    assert stats.num_accepted_tokens_per_pos == [1, 0, 0]
    assert stats.num_draft_tokens_per_pos == [1, 1, 1]
    # Drafts are good for one step only.
    assert scheduler.schedule().scheduled_spec_decode_tokens == {}


def test_tokens_after_a_stop_among_accepted_drafts_are_dropped():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 4, max_tokens=20, stop_token_ids=[2]))
    output = scheduler.schedule()
    scheduler.update_from_output(output, run_model(output, {"a": [7]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, run_model(output, {"a": [1, 2, 3, 4]}))
    (last,) = outputs[0].outputs
    assert last.new_token_ids == [1, 2] and last.finished
    assert not scheduler.requests


def test_drafts_are_cut_where_budget_or_max_model_len_end():
    scheduler = make_scheduler()
    decode(scheduler, "a", "b")
    scheduler.max_num_scheduled_tokens = 6
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], [[1, 2, 3], [4, 5, 6]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 4, "b": 2}
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2, 3], "b": [4]}
    scheduler = make_scheduler(max_model_len=7)
    decode(scheduler, "a")
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"a": [1]}


def test_pieces_of_a_prompt_get_no_drafts():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 14))
    output = scheduler.schedule()
    scheduler.update_from_output(output, run_model(output, {}))
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 6}
    assert not output.scheduled_spec_decode_tokens


def test_a_step_without_tokens_says_nothing_of_its_drafts():
    scheduler = make_scheduler()
    decode(scheduler, "a")
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    output = scheduler.schedule()
    outputs = scheduler.update_from_output(output, run_model(output, {}))
    assert outputs[0].scheduler_stats.spec_decoding_stats is None


def test_a_preempted_request_loses_its_drafts():
    scheduler = make_scheduler()
    decode(scheduler, "a")
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 2, 3]]))
    request = scheduler.requests["a"]
    scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.spec_token_ids == []
    assert scheduler.schedule().num_scheduled_tokens == {"a": 5}


def test_drafts_that_come_late_replace_placeholders_and_are_padded():
    scheduler = make_scheduler()
    decode(scheduler, "a", "b")
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], [[-1] * 3, [-1] * 3]))
    output = scheduler.schedule()
    drafts = DraftTokenIds(["a", "b", "gone"], [[1, 2, 3, 4], [5], [6]])
    scheduler.update_draft_token_ids_in_output(drafts, output)
    assert output.scheduled_spec_decode_tokens == {"a": [1, 2, 3], "b": [5, -1, -1]}
    assert output.num_invalid_spec_tokens == {"b": 2}
    outputs = scheduler.update_from_output(output, run_model(output, {"a": [8], "b": [5, 8]}))
    stats = outputs[0].scheduler_stats.spec_decoding_stats
    # Placeholders count as rejected, but not as drafted.
    assert (stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 1)
    assert scheduler.requests["b"].num_computed_tokens == 6


# ---------------------------------------------------------------- lookahead and padding


@pytest.mark.parametrize(
    ("method", "lookahead"),
    [("ngram", 0), ("draft_model", 3), ("eagle", 3), ("dflash", 4), ("dspark", 3), ("medusa", 0)],
)
def test_drafters_with_a_kv_cache_have_slots_ahead(method, lookahead):
    scheduler = make_scheduler(method=method)
    assert scheduler.num_lookahead_tokens == lookahead
    assert scheduler.use_eagle == (method in ("eagle", "dflash", "dspark"))
    scheduler.add_request(make_request("a", 8, max_tokens=20))
    scheduler.schedule()
    (table,) = scheduler.kv_cache_manager.get_block_ids("a")
    assert len(table) == (8 + lookahead + 3) // 4


def cached_prompt(scheduler):
    """A decode with drafts, and a request whose prompt is all in the cache but for a token."""
    prompt = list(range(100, 109))
    scheduler.add_request(make_request("warm", prompt, max_tokens=20))
    output = scheduler.schedule()
    scheduler.update_from_output(output, run_model(output, {"warm": [7]}))
    scheduler.update_draft_token_ids(DraftTokenIds(["warm"], [[1, 2, 3]]))
    scheduler.add_request(make_request("hit", prompt, max_tokens=20))


def test_a_first_decode_is_padded_to_the_length_of_the_others():
    scheduler = make_scheduler()
    cached_prompt(scheduler)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"warm": 4, "hit": 4}
    assert output.scheduled_spec_decode_tokens == {"warm": [1, 2, 3], "hit": [-1, -1, -1]}
    scheduler.update_from_output(output, run_model(output, {"warm": [1, 9], "hit": [7]}))
    assert scheduler.requests["hit"].num_computed_tokens == 9
    # A draft was never among them.
    assert not scheduler.schedule().scheduled_spec_decode_tokens


def test_a_first_decode_that_cannot_be_padded_waits():
    scheduler = make_scheduler(max_num_batched_tokens=9)
    cached_prompt(scheduler)
    scheduler.max_num_scheduled_tokens = 7
    assert scheduler.schedule().num_scheduled_tokens == {"warm": 4}


def test_nothing_is_padded_beside_a_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    cached_prompt(scheduler)
    hit = scheduler.waiting.pop_request()
    scheduler.add_request(make_request("long", 40))
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"warm": 4, "long": 12}
    scheduler.update_from_output(output, run_model(output, {"warm": [1, 9]}))
    scheduler.max_num_scheduled_tokens = 64
    scheduler.waiting.add_request(hit)
    output = scheduler.schedule()
    assert output.num_scheduled_tokens == {"warm": 1, "long": 28, "hit": 1}


# ---------------------------------------------------------------- fewer drafts in large batches


def test_drafts_by_batch_size():
    lookup = build_dynamic_sd_schedule_lookup([[5, 6, 1], [1, 2, 9]], 8, 3)
    assert lookup == [0, 3, 3, 3, 3, 1, 1, 1, 1]
    scheduler = make_scheduler(per_batch_size=[[1, 1, 3], [2, 8, 1]])
    scheduler.add_request(make_request("a", 4))
    output = scheduler.schedule()
    assert output.num_spec_tokens_to_schedule == 3
    scheduler.add_request(make_request("b", 4))
    assert scheduler.schedule().num_spec_tokens_to_schedule == 3  # b alone: a is in flight
    scheduler.update_from_output(output, run_model(output, {"a": [7]}))
    assert scheduler.schedule().num_spec_tokens_to_schedule == 3


@pytest.mark.parametrize(
    "ranges", [[], [[2, 4, 1]], [[1, 4]], [[1, 4, 1], [4, 5, 1]], [[1, 4, -1]]]
)
def test_ranges_that_leave_a_batch_size_open_are_refused(ranges):
    with pytest.raises(UserError, match="num_speculative_tokens_per_batch_size"):
        build_dynamic_sd_schedule_lookup(ranges, 8, 3)


# ---------------------------------------------------------------- asynchronous, and at random


def test_async_scheduling_plans_with_placeholders_for_drafts():
    scheduler = make_scheduler(async_scheduling=True)
    scheduler.add_request(make_request("a", 4, max_tokens=20))
    first = scheduler.schedule()
    request = scheduler.requests["a"]
    assert (request.num_output_placeholders, request.spec_token_ids) == (1, [-1] * 3)
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"a": 4}
    assert second.scheduled_spec_decode_tokens == {"a": [-1] * 3}
    assert (request.num_computed_tokens, request.num_output_placeholders) == (8, 5)
    scheduler.update_from_output(first, run_model(first, {"a": [7]}))
    assert request.num_output_placeholders == 4
    scheduler.update_from_output(second, run_model(second, {"a": [1, 9]}))
    assert (request.num_computed_tokens, request.num_output_placeholders) == (6, 0)
    assert list(request.output_token_ids) == [7, 1, 9]


def test_async_scheduling_ends_a_request_whose_last_token_is_in_flight():
    scheduler = make_scheduler(async_scheduling=True)
    scheduler.add_request(make_request("a", 4, max_tokens=2))
    first = scheduler.schedule()
    # Even if all drafts are wrong, the second step brings the last token.
    assert scheduler.schedule().num_scheduled_tokens == {"a": 4}
    scheduler.update_from_output(first, run_model(first, {"a": [7]}))
    assert scheduler.schedule().num_scheduled_tokens == {}


@pytest.mark.parametrize("use_async", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_any_traffic_brings_the_tokens_of_an_engine_that_drafts_nothing(use_async, policy, seed):
    rng = random.Random(seed)
    config = spec_config(
        rng.randint(1, 5),
        method=rng.choice(["ngram", "draft_model"]),
        num_blocks=rng.randint(16, 40),
        max_num_batched_tokens=rng.choice([16, 64]),
        caching=rng.random() < 0.7,
        policy=policy,
        async_scheduling=use_async,
    )
    loop = SpecLoop(config)
    lengths = {}
    for number in range(25):
        name = f"r{number}"
        prompt = rng.choice([rng.randint(1, 30), list(range(rng.randint(5, 20)))])
        request = make_request(name, prompt, rng.randint(1, 20), priority=rng.randint(0, 2))
        lengths[name] = (request.num_prompt_tokens, request.max_tokens)
        loop.add(request)
        for _ in range(rng.randint(0, 3)):
            loop.step()
    loop.run()
    for name, (num_prompt, max_tokens) in lengths.items():
        script = [loop.runner.script(name, num_prompt + i) for i in range(max_tokens)]
        got = loop.tokens[name]
        # The pool may be too small for one request, which then ends early.
        assert got == script[: len(got)] and (len(got) == max_tokens or loop.finished[name])
    assert any(stats.spec_decoding_stats for stats in loop.stats)


def test_an_engine_core_verifies_drafts_of_its_worker():
    config = spec_config(3)
    config.parallel_config.worker_cls = DraftingWorker
    core = EngineCore(config, UniProcExecutor, True)
    core.add_request(core.preprocess_add_request(make_engine_request("a", 6, max_tokens=30))[0])
    tokens, steps = [], 0
    while core.scheduler.has_unfinished_requests():
        outputs, _ = core.step()
        tokens += outputs[0].outputs[0].new_token_ids
        steps += 1
    assert tokens == [
        core.model_executor.driver_worker.model_runner.script("a", 6 + i) for i in range(30)
    ]
    assert steps < 20


# ---------------------------------------------------------------- config and refusal


def test_a_worker_that_cannot_draft_refuses_by_name():
    with pytest.raises(UserError, match="num_speculative_tokens=3: NullWorker cannot draft"):
        make_core(spec_config(3))


def test_config_finds_the_method_and_checks_itself():
    run = RunConfig()
    assert finalize(run).speculative_config is None
    run.speculative.num_speculative_tokens = 2
    run.speculative.model = "ngram"
    run.speculative.prompt_lookup_min = 3
    made = finalize(run)
    config = made.speculative_config
    assert (config.method, config.prompt_lookup_min, config.prompt_lookup_max) == ("ngram", 3, 3)
    assert made.num_speculative_tokens == 2
    assert SpeculativeConfig(2, model="some/drafter").method == "draft_model"
    for fields, message in [
        ({"model": "ngram"}, "num_speculative_tokens must be provided"),
        ({"num_speculative_tokens": 2}, "without speculative model"),
        ({"num_speculative_tokens": 0}, "at least 1"),
        (
            {"num_speculative_tokens": 2, "method": "ngram"}
            | {"prompt_lookup_min": 4, "prompt_lookup_max": 2},
            "prompt_lookup_min=4",
        ),
    ]:
        run = RunConfig()
        for name, value in fields.items():
            setattr(run.speculative, name, value)
        with pytest.raises(UserError, match=message):
            finalize(run)
