# SPDX-License-Identifier: Apache-2.0
"""Chunked local attention: sequences are cut, and a token sees its own piece alone."""

from __future__ import annotations

import pytest
import torch
from alone_and_together import assert_alone_as_together

from vllmx.config import KernelConfig, RunConfig, finalize
from vllmx.core.kv_cache_interface import ChunkedLocalAttentionSpec
from vllmx.exceptions import UserError
from vllmx.ir.ops.attention import IN_CHUNKS
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.attention import Attention

OPS = load_ops()
CHUNK = 24


def inputs() -> dict:
    generator = torch.Generator().manual_seed(IN_CHUNKS)
    return OPS["paged_attention"].generate_inputs(IN_CHUNKS, torch.float32, "cpu", generator)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_what_lies_in_other_chunks_changes_nothing(provider: str) -> None:
    """NaN everywhere before the chunk of each request's first new token."""
    given = inputs()
    run = OPS["paged_attention"].impls[provider].fn
    want = run(**given)
    starts = given["query_start_loc"].diff()
    caches = {name: given[name].clone() for name in ("key_cache", "value_cache")}
    for row, length in enumerate(given["seq_lens"].tolist()):
        oldest = (length - int(starts[row])) // CHUNK * CHUNK
        for place in range(oldest):
            block = given["block_table"][row, place // 16].long()
            for cache in caches.values():
                cache[block, place % 16] = 1e4
    assert torch.equal(run(**{**given, **caches}), want)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_chunk_is_what_a_sequence_that_begins_there_is(provider: str) -> None:
    """The request of 40 new tokens: its second piece, alone."""
    given = inputs()
    run = OPS["paged_attention"].impls[provider].fn
    start = int(given["query_start_loc"][3])
    whole = run(**given)[start : start + 40]
    places = torch.arange(CHUNK, 40)
    table = given["block_table"][3].long()
    keys, values = (
        given[name][table[places // 16], places % 16] for name in ("key_cache", "value_cache")
    )
    plain = {**given, "attention_chunk_size": None, "query": given["query"][start + CHUNK :][:16]}
    plain |= {"key_cache": keys[None], "value_cache": values[None]}
    plain["block_table"] = torch.zeros(1, 1, dtype=torch.int32)
    plain["query_start_loc"] = torch.tensor([0, 16], dtype=torch.int32)
    plain["seq_lens"] = torch.tensor([16], dtype=torch.int32)
    torch.testing.assert_close(run(**plain), whole[CHUNK:], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_token_alone_and_in_a_batch(provider: str) -> None:
    assert_alone_as_together(provider, inputs())


def test_backends_without_chunks_refuse_by_name() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    chosen = ops.choose("paged_attention", head_size=64, attention_chunk_size=CHUNK)
    assert chosen.provider == "torch"
    refused = ops.choices["paged_attention"].refused
    assert refused["native"] == refused["sdpa"] == "has no chunked local attention"
    with pytest.raises(UserError, match=r"attention.backend=native: .*no chunked local attention"):
        ops.choose_attention("native", head_size=64, attention_chunk_size=CHUNK)


def test_the_cache_keeps_a_chunk_of_such_a_layer() -> None:
    config = finalize(RunConfig())
    layer = Attention(
        *(4, 64, 0.125, 2),
        vllm_config=config,
        ops=OpTable(KernelConfig(), "cpu", torch.float32),
        prefix="model.layers.0.self_attn.attn",
        attention_chunk_size=CHUNK,
    )
    spec = layer.get_kv_cache_spec(config)
    assert isinstance(spec, ChunkedLocalAttentionSpec)
    assert spec.attention_chunk_size == CHUNK
