# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: a score of each head beside those of its keys, which takes weight and gives
nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alone_and_together import assert_alone_as_together

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.config import KernelConfig, RunConfig, finalize
from vllmx.exceptions import UserError
from vllmx.forward_context import ForwardContext, set_forward_context
from vllmx.ir.ops.attention import WITH_SINKS, paged_attention
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.attention import Attention

OPS = load_ops()


def inputs(case: int = WITH_SINKS) -> dict:
    generator = torch.Generator().manual_seed(case)
    return OPS["paged_attention"].generate_inputs(case, torch.float32, "cpu", generator)


def run(provider: str, given: dict, sinks: torch.Tensor | None) -> torch.Tensor:
    return OPS["paged_attention"].impls[provider].fn(**{**given, "sinks": sinks})


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_sink_takes_its_share_of_the_weight(provider: str) -> None:
    """One key, whose score is known: the output is its value times what the sink leaves it."""
    given = inputs(0)
    plain = run(provider, given, None)
    block = given["block_table"][0, 0].long()
    key = given["key_cache"][block, 0, 0]
    scores = (given["query"][0] @ key) * given["scale"]
    for shift in (-3.0, 0.0, 2.0, 30.0):
        sinks = scores + shift
        left = 1.0 / (1.0 + torch.tensor(shift).exp())
        torch.testing.assert_close(run(provider, given, sinks), plain * left, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_sink_far_below_changes_nothing(provider: str) -> None:
    given = inputs()
    low = torch.full((given["query"].shape[1],), -1e4)
    plain = run(provider, given, None)
    torch.testing.assert_close(run(provider, given, low), plain, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(run(provider, given, low * 0), plain, atol=1e-3)


def test_a_padding_request_is_zero_with_sinks_too() -> None:
    """In Triton's decode, whose parts are joined: a request without keys has no part."""
    given = inputs(6)
    given["seq_lens"] = given["seq_lens"].clone()
    given["seq_lens"][0] = 0
    out = run("triton", given, torch.ones(given["query"].shape[1]))
    assert (out[0] == 0).all() and torch.isfinite(out).all() and (out[1:] != 0).any()


@pytest.mark.parametrize("provider", ["torch", "triton"])
def test_a_token_alone_and_in_a_batch(provider: str) -> None:
    assert_alone_as_together(provider, inputs())


def test_backends_without_sinks_refuse_by_name() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    assert ops.choose("paged_attention", head_size=64, sinks=True).provider == "torch"
    refused = ops.choices["paged_attention"].refused
    assert refused["native"] == refused["sdpa"] == "has no attention sinks"
    with pytest.raises(UserError, match=r"attention.backend=native: .*no attention sinks"):
        ops.choose_attention("native", head_size=64, sinks=True)


def test_a_layer_attends_with_the_sinks_that_it_is_told() -> None:
    given = inputs()
    heads, kv_heads, size = given["query"].shape[1], given["key_cache"].shape[2], 64
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    config = finalize(RunConfig())
    layer = Attention(
        *(heads, size, given["scale"], kv_heads),
        vllm_config=config,
        ops=ops,
        prefix="model.layers.0.self_attn.attn",
        has_sinks=True,
    )
    layer.bind_kv_cache(torch.stack((given["key_cache"], given["value_cache"]), dim=2))
    layer.set_sinks(given["sinks"])
    starts, lengths = given["query_start_loc"].numpy(), given["seq_lens"].numpy()
    common = CommonAttentionMetadata(
        query_start_loc=given["query_start_loc"],
        query_start_loc_np=starts,
        seq_lens=given["seq_lens"],
        seq_lens_np=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=int(np.diff(starts).max()),
        max_seq_len=int(lengths.max()),
        block_table_tensor=given["block_table"],
        slot_mapping=torch.empty(0, dtype=torch.int64),
    )
    builder = layer.backend.get_builder_cls()(16, torch.device("cpu"))
    with set_forward_context(ForwardContext({layer.layer_name: builder.build(common)})):
        out = layer(given["query"].flatten(1), None, None)
    assert torch.equal(out, paged_attention.fn(**given).flatten(1))
    with pytest.raises(AssertionError):
        layer.set_sinks(given["sinks"][:-1])
