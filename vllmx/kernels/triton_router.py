# SPDX-License-Identifier: Apache-2.0
"""Provider `triton` of the routers: a program scores a token's experts and takes the best.

The best is taken and struck out, as many times as experts are wanted; of equals, the first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.ir.op import OpContext
from vllmx.ir.ops.fused_moe import grouped_topk, topk_softmax
from vllmx.kernels.dependent_launch import after_the_last
from vllmx.kernels.on_gpu import on_gpu
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"


def _without_groups(context: OpContext) -> bool | str:
    groups = context.facts.get("num_expert_group", 1)
    if context.device == "cuda" and groups != 1:
        return f"knows of no groups of experts, and there are {groups}"
    return on_gpu(context)


if SUPPORTED is True:

    @triton.jit
    def _route_kernel(
        logits_ptr,
        logits_stride,
        bias_ptr,
        weights_ptr,
        ids_ptr,
        scale,
        EXPERTS: tl.constexpr,
        BLOCK: tl.constexpr,
        TOPK: tl.constexpr,
        PLACES: tl.constexpr,
        SOFTMAX: tl.constexpr,
        RENORMALIZE: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        DEPENDENT_LAUNCH: tl.constexpr,
    ):
        if DEPENDENT_LAUNCH:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        row = tl.program_id(0).to(tl.int64)
        experts = tl.arange(0, BLOCK)
        there = experts < EXPERTS
        nothing = float("-inf")
        logits = tl.load(logits_ptr + row * logits_stride + experts, mask=there, other=nothing)
        logits = logits.to(tl.float32)
        if SOFTMAX:
            scores = tl.exp(logits - tl.max(logits, axis=0))
            scores = scores / tl.sum(scores, axis=0)
        else:
            scores = 1.0 / (1.0 + tl.exp(-logits))
        choice = scores
        if HAS_BIAS:
            choice += tl.load(bias_ptr + experts, mask=there, other=0.0)
        choice = tl.where(there, choice, nothing)
        places = tl.arange(0, PLACES)
        weights = tl.zeros([PLACES], tl.float32)
        ids = tl.zeros([PLACES], tl.int32)
        for place in range(TOPK):
            best = tl.argmax(choice, axis=0)
            weight = tl.sum(tl.where(experts == best, scores, 0.0), axis=0)
            weights = tl.where(places == place, weight, weights)
            ids = tl.where(places == place, best.to(tl.int32), ids)
            choice = tl.where(experts == best, nothing, choice)
        if RENORMALIZE:
            weights = weights / tl.sum(weights, axis=0)
        wanted = places < TOPK
        tl.store(weights_ptr + row * TOPK + places, weights * scale, mask=wanted)
        tl.store(ids_ptr + row * TOPK + places, ids, mask=wanted)


def _route(
    logits: Tensor, topk: int, renormalize: bool, softmax: bool, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens, experts = logits.shape
    weights = torch.empty((tokens, topk), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, topk), dtype=torch.int32, device=logits.device)
    if tokens:
        _route_kernel[(tokens,)](
            logits,
            logits.stride(0),
            weights if bias is None else bias,
            weights,
            ids,
            scale,
            EXPERTS=experts,
            BLOCK=triton.next_power_of_2(experts),
            TOPK=topk,
            PLACES=triton.next_power_of_2(topk),
            SOFTMAX=softmax,
            RENORMALIZE=renormalize,
            HAS_BIAS=bias is not None,
            num_warps=1 if experts <= 256 else 4,
            **after_the_last(logits.device),
        )
    return weights, ids


@topk_softmax.register_impl(
    "triton", supported=SUPPORTED, supports=_without_groups, batch_invariant=("cuda",)
)
def _topk_softmax(gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    return _route(gating_output, topk, renormalize, True, 1.0, None)


@grouped_topk.register_impl(
    "triton", supported=SUPPORTED, supports=_without_groups, batch_invariant=("cuda",)
)
def _grouped_topk(
    gating_output: Tensor,
    topk: int,
    renormalize: bool,
    num_expert_group: int = 1,
    topk_group: int = 1,
    scoring_func: str = "softmax",
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert num_expert_group == 1
    softmax, scale = scoring_func == "softmax", routed_scaling_factor
    return _route(gating_output, topk, renormalize, softmax, scale, e_score_correction_bias)
