# SPDX-License-Identifier: Apache-2.0
"""The account of encoder outputs: shared by name, evicted oldest first, never twice given back."""

from types import SimpleNamespace

import pytest
from engine_helpers import make_config

from vllmx.core.encoder_cache_manager import (
    EncoderCacheManager,
    EncoderDecoderCacheManager,
    compute_mm_encoder_budget,
)
from vllmx.exceptions import UserError
from vllmx.multimodal import MultiModalFeatureSpec, PlaceholderRange
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams

PLENTY = 1000


def request(request_id, **items):
    """A request whose items have a name and a size each, one after the other."""
    features, offset = [], 0
    for name, size in items.items():
        features.append(
            MultiModalFeatureSpec(None, "image", name[0], PlaceholderRange(offset, size))
        )
        offset += size
    params = SamplingParams()
    return Request(request_id, [0] * (offset + 1), params, None, mm_features=features)


def fits(manager, made, index, budget=PLENTY, planned=0):
    return manager.can_allocate(made, index, budget, planned)


def test_an_output_is_shared_by_all_requests_that_name_it():
    manager = EncoderCacheManager(10)
    first, second = request("1", a=6), request("2", a=6)
    assert not manager.check_and_update_cache(first, 0)
    assert fits(manager, first, 0)
    manager.allocate(first, 0)
    assert manager.check_and_update_cache(second, 0)
    assert manager.cached == {"a": {"1", "2"}}
    assert (manager.num_free_slots, manager.num_freeable_slots) == (4, 4)
    manager.free(first)
    assert "a" not in manager.freeable
    manager.free(second)
    assert manager.freeable == {"a": 6}
    assert (manager.num_free_slots, manager.num_freeable_slots) == (4, 10)


def test_the_oldest_output_that_nobody_needs_is_evicted_and_reported_once():
    manager = EncoderCacheManager(10)
    for name in "ab":
        made = request(name, **{name: 4})
        assert fits(manager, made, 0)
        manager.allocate(made, 0)
        manager.free(made)
    taker = request("c", c=6)
    assert fits(manager, taker, 0)
    assert manager.cached == {"b": set()}
    assert manager.get_freed_mm_hashes() == ["a"]
    assert manager.get_freed_mm_hashes() == []


def test_an_output_taken_up_again_is_not_evicted():
    manager = EncoderCacheManager(10)
    old = request("1", a=6)
    manager.allocate(old, 0)
    manager.free(old)
    assert manager.check_and_update_cache(old, 0)
    assert manager.num_freeable_slots == 4
    assert not fits(manager, request("2", b=5), 0)
    assert manager.get_freed_mm_hashes() == []


def test_what_is_planned_and_the_budget_count():
    manager = EncoderCacheManager(10)
    made = request("1", a=5, b=5)
    assert fits(manager, made, 0)
    assert fits(manager, made, 1, planned=5)
    assert not fits(manager, made, 1, planned=6)
    assert not fits(manager, made, 1, budget=4)


def test_an_item_that_comes_twice_is_given_back_once():
    manager = EncoderCacheManager(20)
    made = request("1", a1=4, a2=4)
    manager.allocate(made, 0)
    assert manager.check_and_update_cache(made, 1)
    manager.free(made)
    assert manager.num_freeable_slots == 20
    assert manager.request_cached_ids == {}


def test_giving_back_what_was_evicted_changes_nothing():
    manager = EncoderCacheManager(4)
    made = request("1", a=4)
    manager.allocate(made, 0)
    manager.free_encoder_input(made, 0)
    manager.free_encoder_input(made, 0)
    assert manager.num_freeable_slots == 4
    assert fits(manager, request("2", b=4), 0)
    manager.free_encoder_input(made, 0)
    assert manager.num_freeable_slots == 4


def test_an_allocation_taken_back_leaves_no_trace():
    manager = EncoderCacheManager(10)
    made = request("1", a=4)
    manager.allocate(made, 0)
    assert manager.take_back(made, 0) == set()
    assert manager.cached == {} and manager.freeable == {} and manager.request_cached_ids == {}
    assert manager.num_free_slots == manager.num_freeable_slots == 10


def test_an_allocation_that_others_hold_stays_when_it_is_taken_back():
    manager = EncoderCacheManager(10)
    first, second = request("1", a=4), request("2", a=4)
    manager.allocate(first, 0)
    manager.check_and_update_cache(second, 0)
    assert manager.take_back(first, 0) == {"2"}
    assert manager.cached == {"a": {"2"}}
    assert manager.num_free_slots == 6


def test_reset_makes_room_for_everything():
    manager = EncoderCacheManager(10)
    manager.allocate(request("1", a=10), 0)
    manager.reset()
    assert manager.cached == {} and manager.num_free_slots == manager.num_freeable_slots == 10


def test_an_encoder_decoder_model_shares_nothing_and_frees_a_place_once():
    manager = EncoderDecoderCacheManager(10)
    made = request("1", a=6)
    assert fits(manager, made, 0)
    manager.allocate(made, 0)
    assert not manager.check_and_update_cache(request("2", a=6), 0)
    assert not fits(manager, request("2", a=6), 0)
    for _ in range(3):  # each step of the decoder asks
        manager.free_encoder_input(made, 0)
    manager.free(made)
    assert manager.num_free_slots == 10


def test_the_runner_of_an_encoder_decoder_model_drops_an_output_before_the_next_step():
    manager = EncoderDecoderCacheManager(10)
    manager.allocate(request("1", a=6), 0)
    assert manager.get_freed_mm_hashes() == []
    assert manager.get_freed_mm_hashes() == ["a"]
    assert manager.get_freed_mm_hashes() == []


def test_the_budget_is_that_of_a_step_or_of_the_largest_item():
    config = make_config(max_num_batched_tokens=100).scheduler_config
    assert compute_mm_encoder_budget(config, {}) == (0, 0)
    assert compute_mm_encoder_budget(config, {"image": 64}) == (100, 100)
    assert compute_mm_encoder_budget(config, {"image": 64, "video": 300}) == (300, 300)
    config.disable_chunked_mm_input = True
    assert compute_mm_encoder_budget(config, {"image": 100}) == (100, 100)
    with pytest.raises(UserError, match=r"up to 101 tokens.*max_num_batched_tokens=100"):
        compute_mm_encoder_budget(config, {"image": 101})


def test_embeddings_count_and_text_between_them_does_not():
    position = PlaceholderRange(0, 10, [True, False] * 5)
    feature = MultiModalFeatureSpec(None, "image", "a", position)
    made = Request("1", [0] * 11, SamplingParams(), None, mm_features=[feature])
    manager = EncoderCacheManager(5)
    assert fits(manager, made, 0)
    manager.allocate(made, 0)
    assert manager.num_free_slots == 0
    assert not fits(manager, SimpleNamespace(get_num_encoder_embeds=lambda i: 1), 0)
