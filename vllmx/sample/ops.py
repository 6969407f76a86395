# SPDX-License-Identifier: Apache-2.0
"""Who computes the sampler's steps: torch, or Triton on a GPU. Chosen when the sampler is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from vllmx.kernels import triton_sample
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
    device: str, batch_invariant: bool = False, provider: str | None = None
) -> SamplerOps:
    """The provider of a device: Triton on a GPU if there is Triton, else torch.

    batch_invariant: torch normalises log-probabilities row by row then.
    """
    if provider is None:
        on_gpu = device.startswith("cuda") and triton_sample.SUPPORTED is True
        provider = "triton" if on_gpu else "torch"
    if provider == "triton":
        return SamplerOps(
            provider,
            triton_sample.apply_penalties,
            triton_sample.apply_top_k_top_p,
            triton_sample.gumbel_sample,
            partial(triton_sample.token_values, logprobs=True),
            partial(triton_sample.token_values, logprobs=False),
            batch_invariant=True,
        )
    return SamplerOps(
        provider,
        apply_penalties,
        apply_top_k_top_p,
        gumbel_sample,
        token_logprobs(get_log_softmax(batch_invariant)),
        token_logits,
        batch_invariant=False,
    )
