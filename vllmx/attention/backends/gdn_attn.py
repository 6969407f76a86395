# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/gdn_attn.py @ v0.25.0
"""What a gated delta net needs to know of a batch. The computation is the layer's own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vllmx.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata


@dataclass
class GDNAttentionMetadata:
    """A batch whose decodes, requests with one new token, come before its prefills.

    query_start_loc: int32 [num_reqs + 1]; state_indices: int32 [num_reqs], the block of the states
    that a request reads and writes; has_initial_state: bool [num_reqs], false for a request with
    no computed token, whose states read as zeros whatever the block holds.
    prefill_query_start_loc: int32 [num_prefills + 1], counted from the first prefill's token.
    fresh_decode_indices: blocks of the decodes without a state, for the layer to clear; None where
    there are none.
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decodes: int
    num_decode_tokens: int
    has_initial_state: Tensor
    query_start_loc: Tensor
    state_indices: Tensor
    prefill_query_start_loc: Tensor
    fresh_decode_indices: Tensor | None


class GDNAttentionMetadataBuilder(AttentionMetadataBuilder):
    """Tells decodes from prefills and finds the block of each request's states.

    `mamba_cache_mode` is the spec's: with "align" the states lie in the block of the last token
    that is computed, otherwise in the request's first.
    """

    def __init__(
        self, block_size: int, device: torch.device, mamba_cache_mode: str = "none"
    ) -> None:
        super().__init__(block_size, device)
        self.mamba_cache_mode = mamba_cache_mode

    def build(self, common: CommonAttentionMetadata) -> GDNAttentionMetadata:
        """Metadata of the batch; requests with one new token must come first in it."""
        starts = common.query_start_loc_np
        lengths = starts[1:] - starts[:-1]
        num_decodes = int((lengths == 1).sum())
        assert (lengths[:num_decodes] == 1).all(), "requests with one new token must come first"
        has_state = torch.from_numpy(common.seq_lens_np > lengths)
        table = common.block_table_tensor
        if self.mamba_cache_mode == "align":
            last = ((common.seq_lens - 1) // self.block_size).long()
            state_indices = table.gather(1, last[:, None])[:, 0]
        else:
            state_indices = table[:, 0]
        fresh = ~has_state[:num_decodes]
        any_fresh = bool(fresh.any())
        has_state = has_state.to(self.device)
        return GDNAttentionMetadata(
            num_prefills=len(lengths) - num_decodes,
            num_prefill_tokens=int(starts[-1]) - num_decodes,
            num_decodes=num_decodes,
            num_decode_tokens=num_decodes,
            has_initial_state=has_state,
            query_start_loc=common.query_start_loc,
            state_indices=state_indices,
            prefill_query_start_loc=common.query_start_loc[num_decodes:] - num_decodes,
            fresh_decode_indices=(
                state_indices[:num_decodes][fresh.to(self.device)] if any_fresh else None
            ),
        )
