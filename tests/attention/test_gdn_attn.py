# SPDX-License-Identifier: Apache-2.0
"""What a gated delta net is told of a batch."""

import numpy as np
import pytest
import torch

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder


def metadata_of(lengths: list[int], computed: list[int]) -> GDNAttentionMetadata:
    new, before = np.array(lengths), np.array(computed)
    starts = np.concatenate([[0], new.cumsum()]).astype(np.int32)
    common = CommonAttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy((new + before).astype(np.int32)),
        seq_lens_np=new + before,
        num_reqs=len(new),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(new.max()),
        max_seq_len=int((new + before).max()),
        block_table_tensor=torch.arange(len(new), dtype=torch.int32)[:, None] + 7,
        slot_mapping=torch.arange(int(starts[-1])),
    )
    return GDNAttentionMetadataBuilder(16, torch.device("cpu")).build(common)


def test_decodes_come_first_and_prefills_are_counted_from_their_own_first_token() -> None:
    found = metadata_of([1, 1, 5, 9], [30, 4, 0, 16])
    assert (found.num_decodes, found.num_decode_tokens) == (2, 2)
    assert (found.num_prefills, found.num_prefill_tokens) == (2, 14)
    assert found.query_start_loc.tolist() == [0, 1, 2, 7, 16]
    assert found.prefill_query_start_loc.tolist() == [0, 5, 14]
    assert found.state_indices.tolist() == [7, 8, 9, 10]
    assert found.has_initial_state.tolist() == [True, True, False, True]
    assert found.fresh_decode_indices is None


def test_a_prompt_of_one_token_is_a_decode_whose_state_is_to_be_cleared() -> None:
    found = metadata_of([1, 1, 1, 2], [0, 3, 0, 0])
    assert (found.num_decodes, found.num_prefills) == (3, 1)
    assert found.has_initial_state.tolist() == [False, True, False, False]
    assert found.fresh_decode_indices is not None
    assert found.fresh_decode_indices.tolist() == [7, 9]


@pytest.mark.parametrize(
    ("lengths", "decodes", "prefills"), [([1, 1], 2, 0), ([4], 0, 1), ([1], 1, 0)]
)
def test_batches_of_one_kind(lengths: list[int], decodes: int, prefills: int) -> None:
    found = metadata_of(lengths, [8] * len(lengths))
    assert (found.num_decodes, found.num_prefills) == (decodes, prefills)
    assert found.num_prefill_tokens == sum(lengths) - decodes


def test_a_decode_behind_a_prefill_is_refused() -> None:
    with pytest.raises(AssertionError, match="one new token must come first"):
        metadata_of([3, 1], [0, 5])
