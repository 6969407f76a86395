# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/cpu_attn.py @ v0.25.0
"""Backend `sdpa`: gather a request's keys and values, call torch's scaled_dot_product_attention.

Runs anywhere. Requests with one new token are batched in groups of like length, so that padding
at most doubles the work; longer queries run one request at a time. Grouped-query heads are laid
out as extra query rows, so keys and values are never repeated in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllmx.attention.backend import (
    NO_CHUNKS,
    NO_SINKS,
    AttentionBackend,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllmx.ir.op import OpContext


@dataclass
class DecodeGroup:
    """Requests of one new token each, padded to one length.

    rows: their tokens in the batch, None where they are all of it; slots: int64
    [num_requests * length], where their keys lie in the cache; first_slot: where the keys of a
    request that is alone lie side by side, so that they are looked at without a copy, else None;
    mask: [num_requests, 1, 1, length] or None where nothing is hidden. What is hidden is read from
    slot 0, which stays zero: another request's NaN under a mask would still be NaN. counts: how
    many keys each request sees, [num_requests].
    """

    rows: Tensor | None
    num_reqs: int
    length: int
    slots: Tensor
    mask: Tensor | None
    counts: np.ndarray
    first_slot: int | None = None

    def distances(self) -> Tensor:
        """How far each key lies ahead of its request's token, below zero: [num_requests, length]"""
        newest = torch.from_numpy(self.counts).to(self.slots.device).unsqueeze(1) - 1
        return torch.arange(self.length, device=self.slots.device) - newest


@dataclass
class PrefillRequest:
    """One request of several new tokens: rows first..last of the batch see `length` keys.

    mask: [last - first, length], or None where the plain causal triangle is meant.
    """

    first: int
    last: int
    blocks: Tensor
    mask: Tensor | None
    length: int

    def distances(self) -> Tensor:
        """How far each key lies ahead of each token: [last - first, length]."""
        keys = torch.arange(self.length, device=self.blocks.device)
        return keys - keys[self.first - self.last :].unsqueeze(1)


@dataclass
class Plan:
    """A step's work for layers of one window width."""

    decodes: list[DecodeGroup] = field(default_factory=list)
    prefills: list[PrefillRequest] = field(default_factory=list)


class SDPAMetadata:
    """Plans of one step by window width; each is made when the first such layer asks."""

    def __init__(self, common: CommonAttentionMetadata, block_size: int) -> None:
        self.common = common
        self.block_size = block_size
        self.slot_mapping = common.slot_mapping
        self.plans: dict[int | None, Plan] = {}

    def plan(self, window: int | None) -> Plan:
        """The plan for layers in which a token sees `window` tokens (None: all before it)."""
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = self._make_plan(window)
        return plan

    def _make_plan(self, window: int | None) -> Plan:
        starts = self.common.query_start_loc_np
        seq_lens = self.common.seq_lens_np
        query_lens = np.diff(starts)
        plan = Plan()
        single = np.flatnonzero(query_lens == 1)
        for members in _groups_of_like_length(single, seq_lens, window):
            plan.decodes.append(self._decode_group(members, window))
        for i in np.flatnonzero(query_lens > 1).tolist():
            plan.prefills.append(self._prefill(i, window))
        return plan

    def _decode_group(self, members: np.ndarray, window: int | None) -> DecodeGroup:
        common, block_size = self.common, self.block_size
        table = common.block_table_tensor
        seq_lens = common.seq_lens_np[members].astype(np.int64)
        oldest = np.zeros_like(seq_lens) if window is None else np.maximum(seq_lens - window, 0)
        length = int((seq_lens - oldest).max())
        positions = oldest[:, None] + np.arange(length)
        hidden = positions >= seq_lens[:, None]
        positions[hidden] = 0
        positions_t = torch.from_numpy(positions).to(table.device)
        requests = torch.from_numpy(members).to(table.device).unsqueeze(1)
        blocks = table[requests, positions_t // block_size].long()
        slots = blocks * block_size + positions_t % block_size
        mask = None
        if hidden.any():
            hidden_t = torch.from_numpy(hidden).to(table.device)
            slots.masked_fill_(hidden_t, 0)
            mask = torch.zeros(hidden.shape, device=table.device)
            mask.masked_fill_(hidden_t, float("-inf"))
            mask = mask[:, None, None, :]
        rows = None if len(members) == common.num_actual_tokens else _rows(common, members)
        slots = slots.flatten()
        first_slot = _side_by_side(slots) if len(members) == 1 else None
        counts = seq_lens - oldest
        return DecodeGroup(rows, len(members), length, slots, mask, counts, first_slot)

    def _prefill(self, i: int, window: int | None) -> PrefillRequest:
        common, block_size = self.common, self.block_size
        first, last = int(common.query_start_loc_np[i]), int(common.query_start_loc_np[i + 1])
        seq_len, query_len = int(common.seq_lens_np[i]), last - first
        oldest = seq_len - query_len
        # The oldest new token is the one that looks back furthest.
        start = 0 if window is None else max(oldest + 1 - window, 0) // block_size
        end = -(-seq_len // block_size)
        length = seq_len - start * block_size
        table = common.block_table_tensor
        mask = None
        if query_len != seq_len or (window is not None and window < seq_len):
            rows = torch.arange(oldest, seq_len, device=table.device).unsqueeze(1)
            columns = torch.arange(start * block_size, seq_len, device=table.device)
            hidden = columns > rows
            if window is not None:
                hidden |= columns <= rows - window
            mask = torch.zeros(hidden.shape, device=table.device)
            mask.masked_fill_(hidden, float("-inf"))
        return PrefillRequest(first, last, table[i, start:end].long(), mask, length)


def _side_by_side(slots: Tensor) -> int | None:
    """The first slot if each is the successor of the one before it, else None (or on a GPU)."""
    if slots.device.type != "cpu":
        return None
    numbers = slots.numpy()
    together = (np.diff(numbers) == 1).all()
    return int(numbers[0]) if together else None


def _rows(common: CommonAttentionMetadata, members: np.ndarray) -> Tensor:
    rows = common.query_start_loc_np[members].astype(np.int64)
    return torch.from_numpy(rows).to(common.block_table_tensor.device)


def _groups_of_like_length(
    members: np.ndarray, seq_lens: np.ndarray, window: int | None
) -> list[np.ndarray]:
    """Cut the requests, sorted by length, where padding would more than double the work."""
    if len(members) == 0:
        return []
    work = seq_lens[members] if window is None else np.minimum(seq_lens[members], window)
    # A short request costs a fixed part too: below 64 keys, padding is cheaper than a call.
    work = np.maximum(work, 64)
    if int(work.max()) * len(members) <= 2 * int(work.sum()):
        return [members]
    order = np.argsort(work, kind="stable")
    groups, current = [], [order[0]]
    for index in order[1:]:
        if work[index] > 2 * work[current[0]]:
            groups.append(members[np.array(current)])
            current = []
        current.append(index)
    groups.append(members[np.array(current)])
    return groups


class SDPAMetadataBuilder(AttentionMetadataBuilder):
    """Builds SDPAMetadata."""

    def build(self, common: CommonAttentionMetadata) -> SDPAMetadata:
        """Metadata whose plans are made on demand."""
        return SDPAMetadata(common, self.block_size)


class TorchSDPABackend(AttentionBackend):
    """torch's attention over gathered blocks."""

    name = "sdpa"

    @staticmethod
    def refusal(context: OpContext) -> bool | str:
        """Takes everything but float32 on a GPU, where what torch takes for it is less exact."""
        if context.facts.get("sinks"):
            return NO_SINKS
        if context.facts.get("attention_chunk_size"):
            return NO_CHUNKS
        if context.device != "cpu" and context.dtype == torch.float32:
            return (
                "torch's kernels for float32 on a GPU strayed up to nine times further from the "
                "truth than the definition did (H200, op.paged_attention newest/f32)"
            )
        return True

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """SDPAMetadataBuilder."""
        return SDPAMetadataBuilder

    @staticmethod
    def run(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        metadata: SDPAMetadata,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        """See AttentionBackend.run."""
        scale *= k_scale
        how = (scale, soft_cap, alibi_slopes)
        plan = metadata.plan(sliding_window)
        if not plan.prefills and len(plan.decodes) == 1 and plan.decodes[0].rows is None:
            out = _decode(query, key_cache, value_cache, plan.decodes[0], *how)
            return out if v_scale == 1.0 else out.mul_(v_scale)
        out = torch.empty_like(query)
        for group in plan.decodes:
            rows = group.rows if group.rows is not None else slice(None)
            out[rows] = _decode(query[rows], key_cache, value_cache, group, *how)
        for request in plan.prefills:
            part = query[request.first : request.last]
            out[request.first : request.last] = run_prefill(
                part, key_cache, value_cache, request, *how
            )
        return out if v_scale == 1.0 else out.mul_(v_scale)


def _decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    group: DecodeGroup,
    scale: float,
    soft_cap: float | None,
    alibi_slopes: Tensor | None,
) -> Tensor:
    num_kv_heads, head_size = key_cache.shape[2:]
    if group.first_slot is not None:
        keys = _slots_in_place(key_cache, group.first_slot, group.length)
        values = _slots_in_place(value_cache, group.first_slot, group.length)
    else:
        rows = (-1, num_kv_heads, head_size)
        shape = (group.num_reqs, group.length, num_kv_heads, head_size)
        keys = key_cache.view(rows).index_select(0, group.slots).view(shape).transpose(1, 2)
        values = value_cache.view(rows).index_select(0, group.slots).view(shape).transpose(1, 2)
    heads = query.view(group.num_reqs, num_kv_heads, -1, head_size)
    bias = None
    if alibi_slopes is not None:
        slopes = alibi_slopes.view(1, num_kv_heads, -1, 1)
        bias = slopes * group.distances()[:, None, None]
    out = _attend(heads, keys, values, group.mask, False, scale, soft_cap, bias)
    return out.reshape(query.shape)


def _slots_in_place(cache: Tensor, first: int, length: int) -> Tensor:
    """`length` neighbouring slots of a cache as [1, num_kv_heads, length, head_size], no copy.

    One call where view, slice, view and transpose would be four: 18 us less a layer.
    """
    num_kv_heads, head_size = cache.shape[2:]
    _, slot, head, element = cache.stride()
    return cache.as_strided(
        (1, num_kv_heads, length, head_size),
        (0, head, slot, element),
        cache.storage_offset() + first * slot,
    )


def run_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    request: PrefillRequest,
    scale: float,
    soft_cap: float | None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of one request's new tokens, query [new tokens, num_heads, head_size]."""
    num_kv_heads, head_size = key_cache.shape[2:]
    keys = key_cache.index_select(0, request.blocks).flatten(0, 1)[: request.length]
    values = value_cache.index_select(0, request.blocks).flatten(0, 1)[: request.length]
    group = query.shape[1] // num_kv_heads
    # [kv head, head in group, token, element]; keys are broadcast over the group, not copied.
    heads = query.view(-1, num_kv_heads, group, head_size).permute(1, 2, 0, 3)
    keys = keys.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    values = values.transpose(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    causal = request.mask is None
    bias = None
    if alibi_slopes is not None:
        bias = alibi_slopes.view(num_kv_heads, group, 1, 1) * request.distances()
    out = _attend(heads, keys, values, request.mask, causal, scale, soft_cap, bias)
    return out.permute(2, 0, 1, 3).reshape(query.shape)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    soft_cap: float | None,
    bias: Tensor | None,
) -> Tensor:
    """bias: float32, added to the scores [..., queries, keys]; None for nothing."""
    if mask is not None:
        mask = mask.to(query.dtype)
    if keys.dtype != query.dtype:
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    if soft_cap is None and bias is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )
    # In float32: a score rounded to half precision is off by more than its weight may be.
    scores = torch.matmul(query.float(), keys.transpose(-1, -2).float()) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if bias is not None:
        scores = scores + bias
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    return torch.matmul(scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype), values)
