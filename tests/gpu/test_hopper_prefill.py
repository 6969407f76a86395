# SPDX-License-Identifier: Apache-2.0
"""The prefill kernel for Hopper beside the one that serves every GPU, compiled."""

from typing import Any

import numpy as np
import pytest
import torch

from vllmx.attention.backends.triton_attn import prefill_tiles
from vllmx.kernels import triton_attention
from vllmx.kernels.triton_attention import paged_prefill, tokens_of_a_tile
from vllmx.kernels.triton_hopper_attention import LACKS, hopper_takes

PROMPTS = {
    "one long": ([2048], 0),
    "tokens of every remainder": ([1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 500], 0),
    "after what stands in the cache": ([1, 3, 700, 129, 65, 64, 999], 333),
    "a few tokens far on": ([5, 70], 6001),
}


def make_batch(
    query_lens: list[int], past: int, heads: int, kv_heads: int, head_size: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Random blocks of 16 tokens in random order; what no request holds is NaN."""
    generator = torch.Generator("cuda").manual_seed(len(query_lens) + past)
    counts = np.array(query_lens)
    lengths = counts + past
    blocks = -(-lengths // 16)
    new: dict[str, Any] = {"generator": generator, "device": "cuda"}
    order = torch.randperm(int(blocks.sum()), **new).int() + 1
    table = torch.zeros(len(counts), int(blocks.max()), dtype=torch.int32, device="cuda")
    shape = (int(blocks.sum()) + 1, 16, 2, kv_heads, head_size)
    cache = torch.randn(shape, dtype=dtype, **new)
    cache[0] = float("nan")
    start = 0
    for row, (number, length) in enumerate(zip(blocks, lengths, strict=True)):
        table[row, :number] = order[start : start + number]
        start += number
        if length % 16:
            cache[table[row, number - 1].long(), length % 16 :] = float("nan")
    tokens = tokens_of_a_tile(heads // kv_heads, dtype, head_size)
    # As in a graph: there is room for more tiles than there are.
    tiles = np.concatenate([prefill_tiles(counts, lengths, 0, tokens), np.full((3, 2), -1)])
    starts = np.concatenate([[0], counts.cumsum()])
    query = torch.randn(int(counts.sum()), heads + 2 * kv_heads, head_size, dtype=dtype, **new)
    return {
        "query": query[:, :heads],
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": table,
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "tiles": torch.tensor(tiles, dtype=torch.int32, device="cuda"),
    }


def attended(batch: dict[str, Any]) -> torch.Tensor:
    tokens, heads, head_size = batch["query"].shape
    out = torch.full((tokens, heads, head_size), 7.0, dtype=batch["query"].dtype, device="cuda")
    paged_prefill(
        **batch, out=out, scale=head_size**-0.5, sliding_window=None, soft_cap=None, v_scale=0.5
    )
    torch.cuda.synchronize()
    return out.float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size"), [(16, 8, 128), (8, 2, 128), (16, 1, 64), (32, 4, 64)]
)
@pytest.mark.parametrize("prompts", PROMPTS)
def test_it_is_what_the_other_kernel_says(
    prompts: str,
    heads: int,
    kv_heads: int,
    head_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = make_batch(*PROMPTS[prompts], heads, kv_heads, head_size, dtype)
    tokens = tokens_of_a_tile(heads // kv_heads, dtype, head_size)
    caches = batch["key_cache"], batch["value_cache"]
    hopper = torch.cuda.get_device_capability()[0] == 9 and LACKS is None
    assert hopper_takes(batch["query"], *caches, tokens) == hopper
    got = attended(batch)
    monkeypatch.setattr(triton_attention, "hopper_takes", lambda *_: False)
    want = attended(batch)
    assert not got.isnan().any()
    # Both round weights and outputs to 16 bits, along other cuts of the keys.
    assert float((got - want).norm() / want.norm()) < (3e-3 if dtype == torch.bfloat16 else 4e-4)
    # The same each time: nothing is taken before it is there.
    monkeypatch.undo()
    for _ in range(5):
        assert torch.equal(attended(batch), got)
