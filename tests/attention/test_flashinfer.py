# SPDX-License-Identifier: Apache-2.0
"""What FlashInfer is told: plans, pages, graphs; why it is refused. Its kernels are stood for."""

from __future__ import annotations

import sys
from dataclasses import replace

import flashinfer_stand_in
import numpy as np
import pytest
import torch

from vllmx.attention.backend import CommonAttentionMetadata
from vllmx.attention.backends.flashinfer import (
    FlashInferBackend,
    FlashInferMetadataBuilder,
    Pages,
)
from vllmx.config import KernelConfig
from vllmx.exceptions import UserError
from vllmx.ir.op import OpContext
from vllmx.ir.ops.attention import WITH_SINKS
from vllmx.ir.select import OpTable, load_ops
from vllmx.kernels import flashinfer_ops

OPS = load_ops()
CASES = range(WITH_SINKS)
GPU = OpContext("cuda", torch.bfloat16, {"head_size": 128})


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch):
    """The stand-in in the place of the package."""
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    flashinfer_ops.library.cache_clear()
    flashinfer_stand_in._Wrapper.made.clear()
    yield flashinfer_stand_in
    flashinfer_ops.library.cache_clear()


def inputs_of(op: str, case: int, dtype: torch.dtype) -> dict:
    return OPS[op].generate_inputs(case, dtype, "cpu", torch.Generator().manual_seed(case))


def common_of(given: dict) -> CommonAttentionMetadata:
    starts, lengths = given["query_start_loc"].numpy(), given["seq_lens"].numpy()
    return CommonAttentionMetadata(
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_is_told_what_the_op_means(library, case: int, dtype: torch.dtype) -> None:
    given = inputs_of("paged_attention", case, dtype)
    want = OPS["paged_attention"].fn(**given)
    got = OPS["paged_attention"].impls["flashinfer"].fn(**given)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)


def test_scales_of_a_cache_of_one_byte(library) -> None:
    given = inputs_of("paged_attention", 3, torch.bfloat16)
    for name in ("key_cache", "value_cache"):
        given[name] = given[name].to(torch.float8_e4m3fn)
    given |= {"k_scale": 0.5, "v_scale": 2.0}
    want = OPS["paged_attention"].fn(**given)
    got = OPS["paged_attention"].impls["flashinfer"].fn(**given)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)


def test_layers_of_a_kind_share_a_plan_and_steps_their_wrappers(library) -> None:
    given = inputs_of("paged_attention", 3, torch.bfloat16)
    builder = FlashInferMetadataBuilder(8, torch.device("cpu"))
    for step in (1, 2):
        metadata = builder.build(common_of(given))
        for window in (None, None, 8, 8):
            args = (given["query"], given["key_cache"], given["value_cache"], metadata, 0.1)
            FlashInferBackend.run(*args, window, None)
        assert [w.plans for w in library._Wrapper.made] == [step] * 4  # decode, prefill; windows
        assert [w.runs for w in library._Wrapper.made] == [2 * step] * 4


def test_a_graph_is_planned_before_each_replay(library) -> None:
    """The step is run once, captured, and replayed for batches of other lengths and tables."""
    given = inputs_of("paged_attention", 6, torch.bfloat16)
    query, table, lengths = given["query"], given["block_table"], given["seq_lens"]
    builder = FlashInferMetadataBuilder(16, torch.device("cpu"))
    how = (given["scale"], given["sliding_window"], given["soft_cap"])
    common = common_of(given)
    full = np.full_like(common.seq_lens_np, 250)
    live_table, live_query = table.clone(), query.clone()
    common = replace(common, block_table_tensor=live_table, seq_lens_np=full)

    def step() -> torch.Tensor:
        metadata = builder.build_for_cudagraph_capture(common)
        cache = (given["key_cache"], given["value_cache"])
        return FlashInferBackend.run(live_query, *cache, metadata, *how)

    step()
    (wrapper,) = library._Wrapper.made
    assert wrapper.graph and wrapper.plans == 1 and wrapper.index_workspace is not None
    step()
    assert wrapper.plans == 1  # none while it is captured
    for order in ([0, 1, 2, 3], [1, 3, 0, 2], [2, 0, 1]):
        live_table[: len(order)] = table[order]
        live_query[: len(order)] = query[order]
        builder.plan_replay(4, lengths.numpy()[order])
        got = step()[: len(order)]
        want = OPS["paged_attention"].fn(**given)[order]
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-2)
    assert len(library._Wrapper.made) == 1 and wrapper.plans == 4


def test_a_padding_request_has_one_token_and_one_page() -> None:
    pages = Pages.of(np.array([0, 16, 17, 1], dtype=np.int32), 16)
    assert pages.starts.tolist() == [0, 1, 2, 4, 5]
    assert pages.last_lens.tolist() == [1, 16, 1, 1]
    assert pages.part(2, 4).starts.tolist() == [0, 2, 3]


@pytest.mark.parametrize(
    "op", ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"]
)
def test_ops_are_those_of_the_definition(library, op: str) -> None:
    impl, tried = OPS[op].impls["flashinfer"], 0
    for case in range(8):
        given = inputs_of(op, case, torch.bfloat16)
        facts = OPS[op].facts_of(**given)
        if "x" in given:
            facts["hidden_size"] = given["x"].shape[-1]
        if impl.supports(OpContext("cuda", torch.bfloat16, facts)) is not True:
            continue
        tried += 1
        want = OPS[op].fn(**{k: v.clone() if torch.is_tensor(v) else v for k, v in given.items()})
        torch.testing.assert_close(impl.fn(**given), want, atol=2e-2, rtol=2e-2)
    assert tried


@pytest.mark.parametrize(
    ("context", "words"),
    [
        (replace(GPU, device="cpu"), "runs on a GPU, not on cpu"),
        (replace(GPU, dtype=torch.float32), "float16 and bfloat16, not in torch.float32"),
        (replace(GPU, facts={"sinks": True}), "has no attention sinks"),
        (replace(GPU, facts={"head_size": 80}), "heads of 64, 128, 256, not of 80"),
        (replace(GPU, facts={"kv_cache_dtype": torch.float16}), "reads no cache of torch.float16"),
    ],
)
def test_it_says_what_it_does_not_take(context: OpContext, words: str) -> None:
    assert words in FlashInferBackend.refusal(context)


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    present = {"flashinfer", "triton"}
    monkeypatch.setattr(flashinfer_ops, "has", lambda name: name in present)
    monkeypatch.setattr(flashinfer_ops, "has_nvcc", lambda: False)
    assert "finds no nvcc" in FlashInferBackend.refusal(GPU)
    present.add("flashinfer_jit_cache")
    assert FlashInferBackend.refusal(GPU) is True
    capped = replace(GPU, facts={"head_size": 64, "soft_cap": 30.0, "sliding_window": 512})
    assert FlashInferBackend.refusal(capped) is True
    present.discard("flashinfer")
    assert "flashinfer-python is not installed" in FlashInferBackend.refusal(GPU)
    with pytest.raises(UserError, match=r"attention.backend=flashinfer: .*not installed"):
        OpTable(KernelConfig(), "cuda", torch.bfloat16).choose_attention(
            "flashinfer", head_size=128
        )
