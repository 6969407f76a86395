# SPDX-License-Identifier: Apache-2.0
"""Encoder inputs in the scheduler: encoded as a whole, within budget and cache, and never missing
when the runner needs them."""

import random

import pytest
from engine_helpers import full_spec, make_config, make_scheduler, run_model

from vllmx.config import ECTransferConfig
from vllmx.core.block_hash import get_request_block_hasher, sha256
from vllmx.core.encoder_attention import CrossAttentionManager, CrossAttentionSpec
from vllmx.core.encoder_cache_manager import EncoderCacheManager, EncoderDecoderCacheManager
from vllmx.ec_transfer.base import ECConnectorBase, ECConnectorMetadata
from vllmx.multimodal import MultiModalFeatureSpec, PlaceholderRange
from vllmx.request import Request, RequestStatus
from vllmx.sampling_params import SamplingParams


def image(name, offset, length, is_embed=None):
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length, is_embed))


def request(request_id, num_tokens, *images, max_tokens=4, priority=0):
    return Request(
        request_id,
        [ord(request_id[0])] * num_tokens,
        SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        None,
        mm_features=list(images),
        priority=priority,
        arrival_time=0.0,
        block_hasher=get_request_block_hasher(4, sha256),
        hash_block_size=4,
    )


def scheduler_for(image_size=8, cache_size=None, ec_transfer=None, **config):
    """A scheduler for a model whose images have at most `image_size` embeddings."""
    made = make_config(**config)
    made.model_config.mm_max_toks_per_item = {"image": image_size}
    made.ec_transfer_config = ec_transfer
    scheduler = make_scheduler(made)
    if cache_size is not None:
        scheduler.encoder_cache_manager = EncoderCacheManager(cache_size)
    return scheduler


def update(scheduler, output):
    complete = {
        req_id: [7]
        for req_id in output.num_scheduled_tokens
        if not scheduler.requests[req_id].is_prefill_chunk
    }
    scheduler.update_from_output(output, run_model(output, complete))


def step(scheduler):
    output = scheduler.schedule()
    update(scheduler, output)
    return output


# ---------------------------------------------------------------- what a step encodes


def test_an_item_is_encoded_in_the_step_that_reaches_it_and_given_up_when_it_is_passed():
    scheduler = scheduler_for(max_num_batched_tokens=10)
    scheduler.add_request(request("a", 24, image("x", 12, 8)))
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 10}
    assert output.scheduled_encoder_inputs == {}
    output = step(scheduler)
    assert output.scheduled_encoder_inputs == {"a": [0]}
    assert scheduler.encoder_cache_manager.freeable == {"x": 8}
    output = step(scheduler)
    assert output.scheduled_encoder_inputs == {}


def test_the_last_token_of_a_prompt_may_need_the_encoder():
    scheduler = scheduler_for(max_num_batched_tokens=10)
    scheduler.add_request(request("a", 11, image("x", 10, 1)))
    assert step(scheduler).num_scheduled_tokens == {"a": 10}
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.scheduled_encoder_inputs == {"a": [0]}


def test_tokens_end_before_an_item_that_exceeds_the_budget():
    scheduler = scheduler_for(image_size=6, max_num_batched_tokens=64)
    scheduler.max_num_encoder_input_tokens = 8
    scheduler.add_request(request("a", 20, image("x", 2, 6)))
    scheduler.add_request(request("b", 20, image("y", 3, 6)))
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 20, "b": 3}
    assert output.scheduled_encoder_inputs == {"a": [0]}
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 1, "b": 17}
    assert output.scheduled_encoder_inputs == {"b": [0]}


def test_a_running_request_waits_while_the_cache_is_full_and_later_ones_go_on():
    scheduler = scheduler_for(image_size=6, cache_size=8, max_num_batched_tokens=9)
    scheduler.add_request(request("a", 20, image("x", 2, 6)))
    scheduler.add_request(request("b", 12, image("y", 0, 6)))
    scheduler.add_request(request("c", 4))
    # a takes the whole step, and its image is passed: y may evict it.
    assert step(scheduler).num_scheduled_tokens == {"a": 9}
    scheduler.encoder_cache_manager.check_and_update_cache(scheduler.requests["a"], 0)
    assert step(scheduler).num_scheduled_tokens == {"a": 9}
    assert step(scheduler).num_scheduled_tokens == {"a": 2, "b": 7}


def test_an_item_that_two_requests_have_is_encoded_once():
    scheduler = scheduler_for()
    scheduler.add_request(request("a", 12, image("x", 0, 8)))
    scheduler.add_request(request("b", 12, image("x", 2, 8)))
    assert step(scheduler).scheduled_encoder_inputs == {"a": [0]}


def test_an_item_that_comes_twice_in_a_prompt_is_encoded_once():
    scheduler = scheduler_for()
    scheduler.add_request(request("a", 30, image("x", 0, 8), image("y", 8, 8), image("x", 16, 8)))
    assert step(scheduler).scheduled_encoder_inputs == {"a": [0, 1]}


def test_text_between_embeddings_needs_no_encoder():
    scheduler = scheduler_for(max_num_batched_tokens=6)
    mask = [False, False, True, True]
    scheduler.add_request(request("a", 12, image("x", 4, 4, mask)))
    assert step(scheduler).scheduled_encoder_inputs == {}
    assert step(scheduler).scheduled_encoder_inputs == {"a": [0]}


def test_an_item_is_not_split_where_that_is_not_wanted():
    scheduler = scheduler_for(max_num_batched_tokens=10, disable_chunked_mm_input=True)
    scheduler.add_request(request("a", 30, image("x", 4, 8)))
    assert step(scheduler).num_scheduled_tokens == {"a": 4}
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 10}
    assert output.scheduled_encoder_inputs == {"a": [0]}


def test_a_cached_prefix_makes_the_encoder_superfluous():
    scheduler = scheduler_for()
    scheduler.add_request(request("a", 20, image("x", 0, 8), max_tokens=1))
    assert step(scheduler).scheduled_encoder_inputs == {"a": [0]}
    scheduler.encoder_cache_manager.reset()
    scheduler.add_request(request("a", 20, image("x", 0, 8), max_tokens=1))
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 4}
    assert output.scheduled_encoder_inputs == {}
    # Another image makes another prefix.
    scheduler.add_request(request("a", 20, image("y", 0, 8), max_tokens=1))
    assert step(scheduler).num_scheduled_tokens == {"a": 20}


def test_evicted_outputs_are_named_to_the_runner():
    scheduler = scheduler_for(cache_size=8)
    scheduler.add_request(request("a", 9, image("x", 0, 8), max_tokens=1))
    assert step(scheduler).free_encoder_mm_hashes == []
    scheduler.add_request(request("b", 9, image("y", 0, 8), max_tokens=1))
    assert step(scheduler).free_encoder_mm_hashes == ["x"]


def test_a_request_whose_item_never_fits_is_refused():
    scheduler = scheduler_for(image_size=8, max_num_batched_tokens=16)
    with pytest.raises(ValueError, match="of 17 embeddings exceeds the pre-allocated encoder"):
        scheduler.add_request(request("a", 20, image("x", 0, 17)))
    assert scheduler.requests == {}
    with pytest.raises(ValueError, match="encoder cache size 0"):
        make_scheduler(make_config()).add_request(request("a", 20, image("x", 0, 1)))


def test_an_aborted_request_gives_its_items_up():
    scheduler = scheduler_for(max_num_batched_tokens=6)
    scheduler.add_request(request("a", 20, image("x", 0, 8)))
    step(scheduler)
    assert scheduler.encoder_cache_manager.request_cached_ids == {"a": {0}}
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert scheduler.encoder_cache_manager.request_cached_ids == {}


def test_a_drafter_that_looks_ahead_keeps_items_one_token_longer():
    scheduler = scheduler_for()
    made = request("a", 30, image("x", 4, 8))
    scheduler.encoder_cache_manager.allocate(made, 0)
    scheduler.use_eagle = True
    made.num_computed_tokens = 12
    scheduler._free_encoder_inputs(made)
    assert scheduler.encoder_cache_manager.get_cached_input_ids(made) == {0}
    made.num_computed_tokens, made.num_output_placeholders = 14, 2
    scheduler._free_encoder_inputs(made)
    assert scheduler.encoder_cache_manager.get_cached_input_ids(made) == {0}
    made.num_output_placeholders = 1
    scheduler._free_encoder_inputs(made)
    assert scheduler.encoder_cache_manager.get_cached_input_ids(made) == set()


# ---------------------------------------------------------------- preemption


@pytest.mark.parametrize(
    "have_x, heir",
    [
        ([False], None),
        ([True], "other0"),
        ([True, False], "other0"),
        ([False, True], "other1"),
        ([True, True], "other0"),
    ],
)
def test_what_a_preempted_request_was_to_encode_falls_to_one_that_counts_on_it(have_x, heir):
    scheduler = scheduler_for(
        policy="priority",
        caching=False,
        # In the step: 3 for `low`, 2 for each of the others but the last, which finds 1.
        num_blocks=1 + 3 + 2 * len(have_x) - 1,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )
    scheduler.add_request(request("low", 16, image("x", 8, 4), priority=2))
    step(scheduler)
    for number, has_x in enumerate(have_x):
        images = [image("x", 4, 4)] if has_x else []
        scheduler.add_request(request(f"other{number}", 16, *images, priority=1))
    assert len(step(scheduler).num_scheduled_tokens) == 1 + len(have_x)
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"low"}
    assert set(output.num_scheduled_tokens) == {f"other{i}" for i in range(len(have_x))}
    manager = scheduler.encoder_cache_manager
    if heir is None:
        assert output.scheduled_encoder_inputs == {}
        assert manager.cached == {}
        assert manager.num_free_slots == manager.num_freeable_slots == manager.cache_size
    else:
        assert output.scheduled_encoder_inputs == {heir: [0]}
        assert manager.cached["x"] == {f"other{i}" for i, has_x in enumerate(have_x) if has_x}


def test_what_a_preempted_request_does_not_encode_is_left_for_those_after_it():
    scheduler = scheduler_for(
        policy="priority",
        caching=False,
        num_blocks=6,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )
    scheduler.max_num_encoder_input_tokens = 4
    scheduler.add_request(request("low", 16, image("x", 8, 4), priority=2))
    step(scheduler)
    scheduler.add_request(request("other0", 16, priority=1))
    scheduler.add_request(request("other1", 16, image("y", 4, 4), priority=1))
    assert len(step(scheduler).num_scheduled_tokens) == 3
    output = scheduler.schedule()
    assert output.preempted_req_ids == {"low"}
    assert output.num_scheduled_tokens == {"other0": 4, "other1": 4}
    assert output.scheduled_encoder_inputs == {"other1": [0]}


def test_a_preempted_request_gives_up_the_items_it_holds_and_finds_them_again():
    scheduler = scheduler_for(
        image_size=12,
        policy="priority",
        caching=False,
        num_blocks=5,
        long_prefill_token_threshold=4,
        scheduler_reserve_full_isl=False,
    )
    scheduler.add_request(request("low", 16, image("x", 4, 12), max_tokens=1, priority=2))
    step(scheduler)
    scheduler.add_request(request("high", 8, max_tokens=1, priority=1))
    assert step(scheduler).scheduled_encoder_inputs == {"low": [0]}
    assert step(scheduler).preempted_req_ids == {"low"}
    assert scheduler.encoder_cache_manager.request_cached_ids == {}
    assert scheduler.encoder_cache_manager.freeable == {"x": 12}
    encoded = {}
    while scheduler.requests:
        encoded |= step(scheduler).scheduled_encoder_inputs
    assert encoded == {}


class Runner:
    """The runner's cache of encoder outputs; fails where it would have to compute without one."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.cache = {}

    def run(self, output):
        manager = self.scheduler.encoder_cache_manager
        for name in output.free_encoder_mm_hashes:
            del self.cache[name]
        num_encoded = 0
        for req_id, indices in output.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self.scheduler.requests[req_id].mm_features[index]
                assert feature.identifier not in self.cache, "encoded twice"
                self.cache[feature.identifier] = feature.mm_position.get_num_embeds()
                num_encoded += feature.mm_position.get_num_embeds()
        assert num_encoded <= self.scheduler.max_num_encoder_input_tokens
        assert set(self.cache) == set(manager.cached)
        assert sum(self.cache.values()) == manager.cache_size - manager.num_free_slots
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            made = self.scheduler.requests[req_id]
            end = made.num_computed_tokens  # counted as computed already
            for feature in made.mm_features:
                position = feature.mm_position
                for first, last in position.extract_embeds_range():
                    if first < end and last >= end - num_tokens:
                        assert feature.identifier in self.cache, "encoder cache miss"


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_runner_never_lacks_an_output(policy, seed):
    rng = random.Random(seed)
    scheduler = scheduler_for(
        image_size=12,
        cache_size=30,
        policy=policy,
        num_blocks=20,
        max_num_batched_tokens=rng.choice([16, 40]),
        disable_chunked_mm_input=bool(seed % 2),
        scheduler_reserve_full_isl=False,
    )
    runner = Runner(scheduler)
    names = {name: rng.randint(1, 12) for name in "abcdef"}
    masks = {n: [rng.random() < 0.7 for _ in range(size)] for n, size in names.items()}
    preemptions = 0
    for number in range(700):
        if number < 300 and rng.random() < 0.4 and len(scheduler.requests) < 12:
            images, offset = [], 0
            for name in rng.choices(list(names), k=rng.randint(0, 3)):
                offset += rng.randint(0, 5)
                images.append(image(name, offset, names[name], masks[name]))
                offset += names[name]
            made = request(
                f"{rng.choice('xyz')}{number}",
                offset + rng.randint(1, 10),
                *images,
                max_tokens=rng.randint(1, 12),
                priority=rng.randint(0, 3),
            )
            scheduler.add_request(made)
        if rng.random() < 0.05 and scheduler.requests:
            victim = rng.choice(list(scheduler.requests))
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        output = scheduler.schedule()
        preemptions += len(output.preempted_req_ids)
        runner.run(output)
        update(scheduler, output)
    assert not scheduler.requests, "a request hangs"
    assert scheduler.encoder_cache_manager.request_cached_ids == {}
    assert scheduler.encoder_cache_manager.num_freeable_slots == 30
    assert preemptions > 0


# ---------------------------------------------------------------- encoder-decoder models


def encoder_decoder_scheduler(cache_size=64, num_blocks=64):
    config = make_config(caching=False, num_blocks=num_blocks, max_num_batched_tokens=64)
    config.scheduler_config.adapt_to_encoder_decoder()
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="float32")
    scheduler = make_scheduler(config, [full_spec(4), cross])
    scheduler.is_encoder_decoder = True
    scheduler.max_num_encoder_input_tokens = cache_size
    scheduler.encoder_cache_manager = EncoderDecoderCacheManager(cache_size)
    return scheduler


def cross_blocks(scheduler, request_id):
    (manager,) = (
        manager
        for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
        if isinstance(manager, CrossAttentionManager)
    )
    return len(manager.req_to_blocks.get(request_id, ()))


def test_cross_attention_takes_blocks_for_the_encoders_length_once():
    scheduler = encoder_decoder_scheduler()
    scheduler.add_request(request("a", 3, image("x", 0, 17), max_tokens=8))
    scheduler.add_request(request("b", 3))
    output = step(scheduler)
    assert output.scheduled_encoder_inputs == {"a": [0]}
    assert [len(ids) for ids in output.scheduled_new_reqs[0].block_ids] == [1, 5]
    assert [len(ids) for ids in output.scheduled_new_reqs[1].block_ids] == [1, 0]
    for _ in range(6):
        output = step(scheduler)
        assert output.scheduled_encoder_inputs == {}
        assert cross_blocks(scheduler, "a") == 5
    assert scheduler.encoder_cache_manager.num_free_slots == 64
    step(scheduler)
    assert not scheduler.requests
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 63


def test_an_encoder_decoder_request_waits_for_the_whole_of_its_encoder():
    scheduler = encoder_decoder_scheduler(cache_size=20)
    scheduler.add_request(request("a", 3, image("x", 0, 12)))
    scheduler.add_request(request("b", 3, image("y", 0, 12)))
    assert step(scheduler).scheduled_encoder_inputs == {"a": [0]}
    output = step(scheduler)
    assert output.scheduled_encoder_inputs == {"b": [0]}
    assert output.free_encoder_mm_hashes == ["x"]
    with pytest.raises(ValueError, match="of 24 embeddings exceeds"):
        scheduler.add_request(request("c", 3, image("y", 0, 12), image("z", 0, 12)))


def test_blocks_for_cross_attention_count_at_admission():
    scheduler = encoder_decoder_scheduler(num_blocks=9)
    scheduler.add_request(request("a", 3, image("x", 0, 24)))
    scheduler.add_request(request("b", 3, image("y", 0, 8)))
    output = step(scheduler)
    assert set(output.num_scheduled_tokens) == {"a"}
    assert scheduler.encoder_cache_manager.request_cached_ids == {}


# ---------------------------------------------------------------- the connector


class Metadata(ECConnectorMetadata):
    def __init__(self, names):
        self.names = names


class Connector(ECConnectorBase):
    """Has what `there` names; what `coming` names it will have."""

    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        self.there, self.coming, self.to_load, self.reports = set(), set(), [], []

    def has_cache_item(self, identifier):
        return identifier in self.there

    def ensure_cache_available(self, request, num_computed_tokens):
        return not any(feature.identifier in self.coming for feature in request.mm_features)

    def update_state_after_alloc(self, request, index):
        if self.has_cache_item(request.mm_features[index].identifier):
            self.to_load.append(request.mm_features[index].identifier)

    def build_connector_meta(self, scheduler_output):
        names, self.to_load = self.to_load, []
        return Metadata(names)

    def update_connector_output(self, connector_output):
        self.reports.append(connector_output)

    def start_load_caches(self, encoder_cache, **kwargs):
        raise AssertionError("the scheduler does not load")

    save_caches = start_load_caches


def connected_scheduler(**config):
    transfer = ECTransferConfig(
        ec_connector="Connector", ec_role="ec_consumer", ec_connector_module_path=__name__
    )
    return scheduler_for(ec_transfer=transfer, **config)


def test_an_item_that_the_connector_has_is_fetched_and_not_encoded():
    scheduler = connected_scheduler(max_num_batched_tokens=64)
    scheduler.max_num_encoder_input_tokens = 8  # fetching takes nothing of it
    scheduler.ec_connector.there = {"x"}
    scheduler.add_request(request("a", 30, image("x", 0, 8), image("y", 10, 8)))
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"a": 30}
    assert output.scheduled_encoder_inputs == {"a": [1]}
    assert output.ec_connector_metadata.names == ["x"]
    assert step(scheduler).ec_connector_metadata.names == []


def test_a_request_waits_for_items_on_their_way_and_others_pass_it():
    scheduler = connected_scheduler()
    scheduler.ec_connector.coming = {"x"}
    scheduler.add_request(request("a", 12, image("x", 0, 8)))
    scheduler.add_request(request("b", 5))
    assert step(scheduler).num_scheduled_tokens == {"b": 5}
    scheduler.ec_connector.coming, scheduler.ec_connector.there = set(), {"x"}
    output = step(scheduler)
    assert output.num_scheduled_tokens == {"b": 1, "a": 12}
    assert output.ec_connector_metadata.names == ["x"]


def test_the_connector_hears_what_the_workers_report():
    scheduler = connected_scheduler()
    scheduler.add_request(request("a", 5))
    output = scheduler.schedule()
    result = run_model(output, {"a": [7]})
    result.ec_connector_output = object()
    scheduler.update_from_output(output, result)
    assert scheduler.ec_connector.reports == [result.ec_connector_output]


def test_without_a_connector_there_is_no_metadata():
    scheduler = scheduler_for()
    scheduler.add_request(request("a", 5))
    assert step(scheduler).ec_connector_metadata is None
