# SPDX-License-Identifier: Apache-2.0
"""Positions of items in a prompt, and prompts given as embeddings."""

import numpy as np
import pytest
import torch

from vllmx.multimodal import (
    MultiModalFeatureSpec,
    MultiModalKwargsItem,
    PlaceholderRange,
    get_mm_features_in_window,
    total_num_embeds,
)
from vllmx.request import Request
from vllmx.sampling_params import SamplingParams


def feature(offset, length, identifier="a", **kwargs):
    position = PlaceholderRange(offset, length)
    return MultiModalFeatureSpec(None, "image", identifier, position, **kwargs)


def test_without_a_mask_every_token_is_an_embedding():
    position = PlaceholderRange(offset=3, length=5)
    assert position.get_num_embeds() == 5
    assert position.embeds_cumsum is None
    assert position.get_embeds_indices_in_range(1, 4) == (1, 4)
    assert position.extract_embeds_range() == [(3, 7)]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_mask_of_any_kind_says_which_tokens_are_embeddings(kind):
    position = PlaceholderRange(2, 6, kind([False, True, True, False, False, True]))
    assert position.get_num_embeds() == 3
    assert position.embeds_cumsum == [0, 1, 2, 2, 2, 3]
    assert position.get_embeds_indices_in_range(0, 1) == (0, 0)
    assert position.get_embeds_indices_in_range(2, 6) == (1, 3)
    assert position.extract_embeds_range() == [(3, 4), (7, 7)]
    assert position == PlaceholderRange(2, 6, [False, True, True, False, False, True])
    assert position != PlaceholderRange(2, 6)
    assert position != PlaceholderRange(2, 6, [True] * 6)


def test_a_mask_without_an_embedding_has_none():
    assert PlaceholderRange(0, 2, [False, False]).get_num_embeds() == 0
    assert PlaceholderRange(0, 0, []).get_num_embeds() == 0


def test_features_in_a_window_are_those_that_overlap_it():
    features = [feature(0, 4), feature(4, 2), feature(10, 5)]
    for start, end, expected in [
        (0, 1, (0, 1)),
        (0, 5, (0, 2)),
        (4, 10, (1, 2)),
        (6, 10, (2, 2)),
        (6, 11, (2, 3)),
        (14, 20, (2, 3)),
        (15, 20, (3, 3)),
    ]:
        assert get_mm_features_in_window(features, start, end) == expected
    assert get_mm_features_in_window([], 0, 9) == (0, 0)
    assert total_num_embeds(features) == 11


def test_arguments_of_several_items_are_gathered_by_name():
    item = MultiModalKwargsItem.dummy(3)
    assert item.get_data() == {"dummy": bytes(3)}
    features = [feature(0, 1), feature(2, 1)]
    features[1].data = item
    assert MultiModalFeatureSpec.gather_kwargs(features, {"dummy", "other"}) == {
        "dummy": [bytes(3)]
    }


def request(**kwargs):
    return Request("r", sampling_params=SamplingParams(), pooling_params=None, **kwargs)


def test_a_request_counts_the_embeddings_of_its_items():
    features = [feature(0, 4), MultiModalFeatureSpec(None, "image", "b", PlaceholderRange(4, 2))]
    made = request(prompt_token_ids=[0] * 6, mm_features=features)
    assert made.has_encoder_inputs and made.num_encoder_inputs == 2
    assert [made.get_num_encoder_embeds(i) for i in range(2)] == [4, 2]
    assert not request(prompt_token_ids=[0]).has_encoder_inputs


def test_a_prompt_of_embeddings_has_a_token_a_row():
    made = request(prompt_token_ids=None, prompt_embeds=np.zeros((5, 2), np.float32))
    assert made.num_prompt_tokens == made.num_tokens == 5
    made.append_output_token_ids(9)
    assert made.all_token_ids == [0, 0, 0, 0, 0, 9]


def test_tokens_and_embeddings_of_a_prompt_must_agree_in_length():
    both = request(prompt_token_ids=[1, 2], prompt_embeds=np.zeros((2, 4), np.float32))
    assert both.all_token_ids == [1, 2]
    with pytest.raises(ValueError, match="different lengths: 3 and 2"):
        request(prompt_token_ids=[1, 2, 3], prompt_embeds=np.zeros((2, 4), np.float32))
    with pytest.raises(ValueError, match="prompt_token_ids or prompt_embeds"):
        request(prompt_token_ids=None)
