# SPDX-License-Identifier: Apache-2.0
"""Who computes the sampler's steps: torch, or on a GPU Triton, or FlashInfer what it has of them.
Chosen when the sampler is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from vllmx.kernels import flashinfer_ops, flashinfer_sample, triton_sample, triton_top_k
from vllmx.sample.gumbel import gumbel_sample
from vllmx.sample.logprob import TokenValues, get_log_softmax, token_logits, token_logprobs
from vllmx.sample.penalties import apply_penalties
from vllmx.sample.topk_topp import apply_top_k_top_p


@dataclass(frozen=True)
class SamplerOps:
    """One provider; the functions are as those of torch.

    batch_invariant: whether a row's result depends on that row alone, bit by bit.
    """

    provider: str
    apply_penalties: Callable[..., None]
    apply_top_k_top_p: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    gumbel_sample: Callable[..., Tensor]
    token_logprobs: TokenValues
    token_logits: TokenValues
    batch_invariant: bool


def get_sampler_ops(
    device: str,
    batch_invariant: bool = False,
    provider: str | None = None,
    priority: Sequence[str] = (),
) -> SamplerOps:
    """The provider of a device, if none is named the first of `priority` that can run here, else
    Triton on a GPU and torch elsewhere.

    batch_invariant: FlashInfer is passed over, and torch normalises log-probabilities row by row.
    """
    if provider is None:
        provider = next(
            name
            for name in (*priority, "triton", "torch")
            if _runs(name, device.startswith("cuda"), batch_invariant)
        )
    if provider == "torch":
        return SamplerOps(
            provider,
            apply_penalties,
            apply_top_k_top_p,
            gumbel_sample,
            token_logprobs(get_log_softmax(batch_invariant)),
            token_logits,
            batch_invariant=False,
        )
    ops = SamplerOps(
        "triton",
        triton_sample.apply_penalties,
        triton_top_k.apply_top_k_top_p,
        triton_sample.gumbel_sample,
        partial(triton_sample.token_values, logprobs=True),
        partial(triton_sample.token_values, logprobs=False),
        batch_invariant=True,
    )
    if provider == "triton":
        return ops
    return replace(
        ops,
        provider=provider,
        apply_top_k_top_p=flashinfer_sample.apply_top_k_top_p,
        batch_invariant=False,
    )


def _runs(provider: str, on_gpu: bool, batch_invariant: bool) -> bool:
    if provider == "flashinfer":
        return on_gpu and not batch_invariant and flashinfer_ops.missing() is None
    if provider == "triton":
        return on_gpu and triton_sample.SUPPORTED is True
    return provider == "torch"
