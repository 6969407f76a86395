# SPDX-License-Identifier: Apache-2.0
"""Every attention backend against the op's definition, on batches of any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllmx.attention.backends.torch_sdpa import _groups_of_like_length
from vllmx.attention.selector import all_backends
from vllmx.ir.op import OpContext
from vllmx.ir.ops.attention import paged_attention

requests = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 70)).map(lambda t: (t[0], t[0] + t[1])),
    min_size=1,
    max_size=6,
)


def batch(lens: list, kv_heads: int, group: int, head_size: int, block_size: int, seed: int):
    """Paged inputs for requests of (query length, sequence length)."""
    generator = torch.Generator().manual_seed(seed)
    width = -(-max(seq for _, seq in lens) // block_size)
    blocks = width * len(lens) + 1
    cache = torch.randn(blocks, block_size, 2, kv_heads, head_size, generator=generator)
    cache[0] = 0.0  # the null block is never written
    unused = torch.ones(blocks * block_size, dtype=torch.bool)
    table = (torch.randperm(blocks - 1, generator=generator) + 1).view(len(lens), width)
    for row, (_, seq) in enumerate(lens):
        for position in range(seq):
            unused[table[row, position // block_size] * block_size + position % block_size] = False
        # Past a request's own blocks a table has entries of requests that came before.
        table[row, -(-seq // block_size) :] = table[0, 0]
    unused[:block_size] = False
    # What no request has written may be anything, NaN included, and must never be seen.
    cache.view(-1, 2, kv_heads, head_size)[unused] = float("nan")
    tokens = sum(query for query, _ in lens)
    return {
        "query": torch.randn(tokens, kv_heads * group, head_size, generator=generator),
        "key_cache": cache[:, :, 0],
        "value_cache": cache[:, :, 1],
        "block_table": table.int(),
        "query_start_loc": torch.tensor([0] + [q for q, _ in lens]).cumsum(0).int(),
        "seq_lens": torch.tensor([seq for _, seq in lens], dtype=torch.int32),
        "scale": head_size**-0.5,
    }


@pytest.mark.parametrize("name", sorted(all_backends()))
@given(
    lens=requests,
    shape=st.sampled_from([(1, 1, 32), (1, 4, 64), (3, 3, 64), (2, 2, 16)]),
    block_size=st.sampled_from([4, 16]),
    window=st.sampled_from([None, 1, 5, 16, 40]),
    soft_cap=st.sampled_from([None, 3.0]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_backend_equals_the_definition(
    name: str, lens: list, shape: tuple, block_size: int, window: int, soft_cap: float, seed: int
) -> None:
    backend = all_backends()[name]
    facts = {"head_size": shape[2], "sliding_window": window, "soft_cap": soft_cap}
    # Triton's interpreter stands in for a GPU.
    device = "cuda" if name == "triton" else "cpu"
    if backend.refusal(OpContext(device, torch.float32, facts)) is not True:
        return
    inputs = batch(lens, *shape, block_size, seed)
    want = paged_attention(**inputs, sliding_window=window, soft_cap=soft_cap)
    got = backend.op_call(**inputs, sliding_window=window, soft_cap=soft_cap)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=40),
    window=st.sampled_from([None, 128]),
)
@settings(max_examples=200, deadline=None)
def test_groups_cover_every_request_and_at_most_double_the_work(
    lengths: list[int], window: int | None
) -> None:
    import numpy as np

    seq_lens = np.array(lengths)
    groups = _groups_of_like_length(np.arange(len(lengths)), seq_lens, window)
    assert sorted(np.concatenate(groups).tolist()) == list(range(len(lengths)))
    work = np.maximum(seq_lens if window is None else np.minimum(seq_lens, window), 64)
    padded = sum(int(work[g].max()) * len(g) for g in groups)
    assert padded <= 2 * int(work.sum())


def test_a_token_sees_itself_and_the_window_minus_one_before_it() -> None:
    """Change the key at distance d from the last token: its output moves for d < W only."""
    window = 8
    for query_len in (1, 20):
        inputs = batch([(query_len, 20)], 1, 1, 16, 4, 0)
        # FlashInfer's kernels need a GPU; tests/attention/test_flashinfer.py has its plans.
        for backend in (b for b in all_backends().values() if b.name != "flashinfer"):
            before = backend.op_call(**inputs, sliding_window=window)[-1]
            for distance in (0, window - 1, window, window + 1):
                changed = {**inputs, "value_cache": inputs["value_cache"].clone()}
                position = 19 - distance
                block = inputs["block_table"][0, position // 4]
                changed["value_cache"][block, position % 4] += 1.0
                after = backend.op_call(**changed, sliding_window=window)[-1]
                assert torch.equal(before, after) == (distance >= window)
