# SPDX-License-Identifier: Apache-2.0
"""Upstream's V1 rejection sampler by vllmx's, which follows Model Runner V2.

A call brings its requests along; vllmx keeps them in rows, so rows are made of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vllmx.sample import rejection_sampler
from vllmx.sample.sampler import Sampler as VllmxSampler
from vllmx.sampling_params import SamplingParams
from vllmx.spec_decode import metadata as spec_decode_metadata

from .v1_sampler import SamplingMetadata, make_rows


@dataclass
class SamplerOutput:
    """What a V1 sampler returns."""

    sampled_token_ids: Tensor
    logprobs_tensors: Any = None


@dataclass
class SpecDecodeMetadata:
    """What a V1 call is told of its drafts; the indices are those of `logits` in that call."""

    draft_token_ids: Tensor
    num_draft_tokens: list[int]
    cu_num_draft_tokens: Tensor
    target_logits_indices: Tensor
    bonus_logits_indices: Tensor

    @classmethod
    def make_dummy(
        cls, draft_token_ids: list[list[int]], device: torch.device
    ) -> SpecDecodeMetadata:
        """With indices that are all 0."""
        lengths = [len(ids) for ids in draft_token_ids]
        flat = [token for ids in draft_token_ids for token in ids]
        zeros = torch.zeros(len(flat) + len(lengths), dtype=torch.int32, device=device)
        return cls(
            torch.tensor(flat, dtype=torch.int32, device=device),
            lengths,
            torch.tensor(lengths, device=device).cumsum(0).int(),
            zeros[: len(flat)],
            zeros[len(flat) :],
        )


class RejectionSampler:
    """Writes the requests of each call into rows of a sampler of vllmx's; the bonus tokens are
    those of the sampler that upstream's is given."""

    def __init__(
        self, sampler: Any, spec_config: Any = None, device: torch.device | None = None
    ) -> None:
        self.sampler = sampler
        self.config = spec_config

    def __call__(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: Tensor | None,
        logits: Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        drafts = spec_decode_metadata.SpecDecodeMetadata.make(
            metadata.draft_token_ids, np.array(metadata.num_draft_tokens)
        )
        is_target = drafts.local_pos < drafts.num_draft_tokens[drafts.requests]
        judged = logits.new_zeros((len(is_target), logits.shape[1]))
        judged[is_target] = logits[metadata.target_logits_indices.long()]
        count = len(metadata.num_draft_tokens)
        outputs = sampling_metadata.output_token_ids or [[] for _ in range(count)]
        states = make_rows(count, logits.shape[1], sampling_metadata.prompt_token_ids, outputs)
        rows = np.array([states.req_id_to_index[str(i)] for i in range(count)])
        engine_seed = int(torch.randint(1 << 62, ()))
        rows_sampler = VllmxSampler(states, self.sampler.logprobs_mode, engine_seed)
        for i, row in enumerate(rows.tolist()):
            params = _params(sampling_metadata, i)
            rows_sampler.add_request(row, int(states.prompt_len[row]), params)
        output = rejection_sampler.RejectionSampler(rows_sampler, self.config)(
            judged, rows, states.total_len[rows] - 1, drafts, _by_request(drafts, draft_probs)
        )
        sampled = output.sampled_token_ids.to(torch.int32)
        bonus = self.sampler(
            logits=logits[metadata.bonus_logits_indices.long()],
            sampling_metadata=sampling_metadata,
        ).sampled_token_ids.flatten()
        drafted = torch.from_numpy(drafts.num_draft_tokens)
        whole = output.num_sampled > drafted
        sampled[whole, drafted[whole]] = bonus[whole].to(torch.int32)
        return SamplerOutput(sampled)


def _by_request(
    drafts: spec_decode_metadata.SpecDecodeMetadata, draft_probs: Tensor | None
) -> Tensor | None:
    """Probabilities [num_tokens, vocab] as [batch, max_spec_len, vocab]."""
    if draft_probs is None:
        return None
    shape = (len(drafts.num_draft_tokens), drafts.max_spec_len)
    table = draft_probs.new_zeros((*shape, draft_probs.shape[1]))
    has_draft = np.arange(shape[1]) < drafts.num_draft_tokens[:, None]
    table[torch.from_numpy(has_draft)] = draft_probs
    return table


def _params(given: SamplingMetadata, i: int) -> SamplingParams:
    """Request i of a call as parameters."""
    numbers: dict[str, Any] = {"temperature": 0.0}
    if given.temperature is not None:
        numbers["temperature"] = float(given.temperature[i])
    if given.top_k is not None:
        numbers["top_k"] = int(given.top_k[i])
    if given.top_p is not None:
        numbers["top_p"] = float(given.top_p[i])
    if not given.no_penalties:
        numbers["presence_penalty"] = float(given.presence_penalties[i])
        numbers["frequency_penalty"] = float(given.frequency_penalties[i])
        numbers["repetition_penalty"] = float(given.repetition_penalties[i])
    if i in given.generators:
        numbers["seed"] = given.generators[i].initial_seed()
    params = SamplingParams(**numbers)
    mask = given.allowed_token_ids_mask
    if mask is not None:
        params.allowed_token_ids = (~mask[i]).nonzero().flatten().tolist()
    params._bad_words_token_ids = given.bad_words_token_ids.get(i)
    return params


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    sampling_metadata: Any,
    device: Any,
    use_fp64_gumbel: bool = False,
) -> Tensor:
    """Draws from what drafts leave, by V1's noise: exponentials, one row of them a request."""
    shape = (len(num_draft_tokens), target_probs.shape[1])
    noise = torch.empty(shape, dtype=torch.float64 if use_fp64_gumbel else torch.float32)
    noise.exponential_()
    for i, generator in sampling_metadata.generators.items():
        if num_draft_tokens[i] > 0:
            noise[i].exponential_(generator=generator)
    left = rejection_sampler.residual(target_probs, draft_token_ids.flatten().long(), draft_probs)
    request = torch.arange(len(num_draft_tokens)).repeat_interleave(torch.tensor(num_draft_tokens))
    chosen = (left / noise[request]).argmax(dim=-1)
    return chosen.to(draft_token_ids.dtype).reshape(draft_token_ids.shape)
