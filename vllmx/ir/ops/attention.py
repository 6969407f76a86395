# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/attention/backends/*.py @ v0.25.0
"""Causal attention over the paged cache: prefill, decode and mixed batches in one call."""

from typing import Any

import torch
from torch import Tensor

from vllmx.ir.op import register_op


@register_op
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: Tensor | None = None,
    attention_chunk_size: int | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Attention of each request's new tokens to all its tokens so far, themselves included.

    query: [num_tokens, num_heads, head_size], the requests one after another;
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_size];
    block_table: int32 [num_reqs, max_blocks]; query_start_loc: int32 [num_reqs + 1];
    seq_lens: int32 [num_reqs], tokens in the cache with the new ones.
    sliding_window W: a token sees itself and the W - 1 before it. soft_cap c: c * tanh(s / c).
    k_scale, v_scale: what a number of either cache is to be multiplied with; 1.0 unless the cache
    has one byte a number. sinks: [num_heads], the score of one more key of each head, which has
    no value. attention_chunk_size C: sequences are cut every C tokens, and a token sees nothing of
    other pieces than its own. alibi_slopes: float32 [num_heads], what the score of a key is less by
    for each token between it and the query. Computed in float32; returns query's shape and dtype.
    """
    out = torch.empty_like(query)
    group = query.shape[1] // key_cache.shape[2]
    block_size = key_cache.shape[1]
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        first, last = starts[i], starts[i + 1]
        blocks = block_table[i, : -(-seq_len // block_size)].long()
        keys = key_cache[blocks].flatten(0, 1)[:seq_len].float()
        values = value_cache[blocks].flatten(0, 1)[:seq_len].float()
        keys = keys.repeat_interleave(group, dim=1)
        values = values.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), keys) * (scale * k_scale)
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        rows = torch.arange(seq_len - (last - first), seq_len, device=query.device).unsqueeze(1)
        columns = torch.arange(seq_len, device=query.device)
        hidden = columns > rows
        if alibi_slopes is not None:
            scores = scores + alibi_slopes.float()[:, None, None] * (columns - rows)
        if sliding_window is not None:
            hidden |= columns <= rows - sliding_window
        if attention_chunk_size is not None:
            hidden |= columns < rows // attention_chunk_size * attention_chunk_size
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        scores = scores.softmax(dim=-1)[..., :seq_len]
        attended = torch.einsum("hqk,khd->qhd", scores, values) * v_scale
        out[first:last] = attended.to(query.dtype)
    return out


paged_attention.set_tolerance(
    torch.float16,
    atol=2e-3,
    rtol=2e-3,
    why="probabilities rounded to half precision: 1.95e-3, one unit in the last place at 2, is "
    "what torch's own attention differs by on the cases below",
)


@paged_attention.register_facts
def _paged_attention_facts(
    sinks: Tensor | None = None,
    attention_chunk_size: int | None = None,
    alibi_slopes: Tensor | None = None,
    **others: Any,
) -> dict[str, Any]:
    facts: dict[str, Any] = {} if sinks is None else {"sinks": True}
    if attention_chunk_size is not None:
        facts["attention_chunk_size"] = attention_chunk_size
    if alibi_slopes is not None:
        facts["alibi"] = True
    return facts


BATCHES = (
    # (query lengths, sequence lengths, heads, kv heads, head size, block size, window, soft cap)
    ([1], [1], 2, 1, 64, 16, None, None),
    ([1, 1, 1], [5, 40, 17], 9, 3, 64, 16, None, None),
    ([20, 7], [20, 7], 4, 1, 256, 16, None, None),
    ([1, 13, 1, 6], [33, 29, 2, 6], 4, 2, 64, 8, None, None),
    ([1, 13, 1, 6], [33, 29, 2, 6], 4, 2, 64, 8, 8, None),
    ([1, 9], [20, 24], 4, 4, 32, 16, None, 5.0),
    ([1, 1, 1, 1], [3, 250, 9, 4], 4, 1, 64, 16, 16, None),
    ([1, 1, 13, 6], [250, 3, 29, 6], 4, 2, 64, 16, None, None),
    ([1, 1, 1, 40, 9], [250, 24, 25, 40, 70], 4, 2, 64, 16, None, None),
    ([1, 1, 13, 6], [250, 3, 29, 6], 6, 2, 64, 16, None, None),
)
WITH_SINKS = 7
"""The batch whose heads have sinks."""
IN_CHUNKS = 8
"""The batch whose sequences are cut, every 24 tokens."""
WITH_SLOPES = 9
"""The batch whose heads weigh distance, each by a slope of its own."""


@paged_attention.register_inputs
def _paged_attention_inputs(
    case: int, dtype: torch.dtype, device: str, generator: torch.Generator
) -> dict[str, Any]:
    query_lens, seq_lens, heads, kv_heads, head_size, block_size, window, cap = BATCHES[
        case % len(BATCHES)
    ]
    width = -(-max(seq_lens) // block_size)
    num_blocks = width * len(seq_lens) + 1
    cache = torch.randn(num_blocks, block_size, 2, kv_heads, head_size, generator=generator)
    cache = cache.to(device, dtype)
    order = torch.randperm(num_blocks - 1, generator=generator)[: width * len(seq_lens)] + 1
    table = order.view(len(seq_lens), width).to(torch.int32)
    for row, length in enumerate(seq_lens):
        table[row, -(-length // block_size) :] = 0
    query = torch.randn(sum(query_lens), heads, head_size, generator=generator) * 2
    with_sinks = case % len(BATCHES) == WITH_SINKS
    sinks = torch.randn(heads, generator=generator) * 2 if with_sinks else None
    slopes = 2.0 ** -torch.arange(1, heads + 1)
    return {
        "query": query.to(device, dtype),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": table.to(device),
        "query_start_loc": torch.tensor([0, *query_lens]).cumsum(0).to(device, torch.int32),
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32, device=device),
        "scale": head_size**-0.5,
        "sliding_window": window,
        "soft_cap": cap,
        "sinks": None if sinks is None else sinks.to(device, dtype),
        "attention_chunk_size": 24 if case % len(BATCHES) == IN_CHUNKS else None,
        "alibi_slopes": slopes.to(device) if case % len(BATCHES) == WITH_SLOPES else None,
    }
