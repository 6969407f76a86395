# SPDX-License-Identifier: Apache-2.0
"""Who computes the sampler's steps, and FlashInfer's part with the library's rules written out."""

from types import SimpleNamespace

import pytest
import torch

from vllmx.kernels import flashinfer_ops, flashinfer_sample, triton_sample
from vllmx.sample import ops, topk_topp
from vllmx.sample.ops import get_sampler_ops

NONE = float("-inf")


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_ops, "missing", lambda: None)
    monkeypatch.setattr(triton_sample, "SUPPORTED", True)


@pytest.mark.parametrize(
    ("device", "priority", "provider"),
    [
        ("cuda", [], "triton"),
        ("cuda", ["flashinfer", "triton", "torch"], "flashinfer"),
        ("cuda", ["triton", "flashinfer"], "triton"),
        ("cuda", ["torch"], "torch"),
        ("cuda", ["native", "cpu"], "triton"),
        ("cpu", [], "torch"),
        ("cpu", ["flashinfer", "triton"], "torch"),
    ],
)
def test_the_first_of_the_priority_that_can_run(
    everything: None, device: str, priority: list[str], provider: str
) -> None:
    assert get_sampler_ops(device, priority=priority).provider == provider


def test_flashinfer_is_passed_over_where_it_is_missing_or_batches_must_not_matter(
    everything: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = get_sampler_ops("cuda", batch_invariant=True, priority=["flashinfer"])
    assert (chosen.provider, chosen.batch_invariant) == ("triton", True)
    assert not get_sampler_ops("cuda", priority=["flashinfer"]).batch_invariant
    monkeypatch.setattr(flashinfer_ops, "missing", lambda: "no nvcc")
    assert get_sampler_ops("cuda", priority=["flashinfer"]).provider == "triton"


def test_flashinfer_draws_tokens_as_all_others_do(everything: None) -> None:
    chosen = get_sampler_ops("cuda", provider="flashinfer")
    assert chosen.gumbel_sample is triton_sample.gumbel_sample
    assert chosen.apply_top_k_top_p is flashinfer_sample.apply_top_k_top_p
    assert ops.get_sampler_ops("cpu").apply_top_k_top_p is topk_topp.apply_top_k_top_p


def _top_k_mask_logits(logits: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    assert top_k.dtype == torch.int32
    kept = [row >= row.topk(int(k)).values[-1] for row, k in zip(logits, top_k, strict=True)]
    return torch.where(torch.stack(kept), logits, NONE)


def _top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    kept = []
    for row, p in zip(probs, top_p, strict=True):
        descending = row.sort(descending=True).values
        count = int((descending.double().cumsum(0) < float(p)).sum())
        # The library's own rule for p = 0: nothing is left.
        edge = descending[min(count, len(row) - 1)] if p > 0 else 2.0
        kept.append(row >= edge)
    left = torch.where(torch.stack(kept), probs, 0.0)
    return left / left.sum(dim=-1, keepdim=True).clamp(min=1e-30)


def test_flashinfer_keeps_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = SimpleNamespace(
        top_k_mask_logits=_top_k_mask_logits, top_p_renorm_probs=_top_p_renorm_probs
    )
    monkeypatch.setattr(flashinfer_sample, "library", lambda: SimpleNamespace(sampling=sampling))
    logits = torch.randn(6, 500, generator=torch.Generator().manual_seed(0)) * 3
    logits[1, 3] = 200.0  # of all others nothing is left in float32
    logits[4, 100:] = NONE
    top_k = torch.tensor([1, 500, 500, 7, 30, 500])
    top_p = torch.tensor([1.0, 1.0, 1e-7, 0.9, 0.5, 0.0])
    for k, p in ((top_k, None), (None, top_p), (top_k, top_p)):
        want = topk_topp.apply_top_k_top_p(logits.clone(), k, p)
        got = flashinfer_sample.apply_top_k_top_p(logits.clone(), k, p)
        assert torch.equal(got, want)
