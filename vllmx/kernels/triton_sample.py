# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/worker/gpu/sample/gumbel.py, logprob.py, penalties.py @ v0.25.0
"""Triton kernels of the sampler. Each row is worked on alone and in one order, so none of the
results depends on the batch; the host waits for none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

COLUMNS = 1024
"""Logits that a program draws noise for, or changes."""
WIDE = 4096
"""Logits that a program which goes over a whole row looks at at once."""


if SUPPORTED is True:

    @triton.jit
    def _penalties_kernel(
        logits_ptr,
        logits_stride,
        columns,
        place_ptr,
        index_ptr,
        presence_ptr,
        frequency_ptr,
        repetition_ptr,
        counts_ptr,
        in_prompt_ptr,
        BLOCK: tl.constexpr,
    ):
        request = tl.program_id(0)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < columns
        table = tl.load(index_ptr + request).to(tl.int64) * columns + token
        count = tl.load(counts_ptr + table, mask=inside, other=0)
        in_prompt = tl.load(in_prompt_ptr + table, mask=inside, other=0) != 0
        row_ptr = logits_ptr + tl.load(place_ptr + request).to(tl.int64) * logits_stride + token
        x = tl.load(row_ptr, mask=inside, other=0.0)
        repetition = tl.load(repetition_ptr + request)
        scaled = x * tl.where(x > 0, 1.0 / repetition, repetition)
        x = tl.where(in_prompt | (count > 0), scaled, x)
        x -= tl.load(frequency_ptr + request) * count.to(tl.float32)
        x -= tl.load(presence_ptr + request) * (count > 0).to(tl.float32)
        tl.store(row_ptr, x, mask=inside)

    @triton.jit
    def _gumbel_kernel(
        logits_ptr,
        logits_stride,
        columns,
        temperature_ptr,
        seeds_ptr,
        positions_ptr,
        best_ptr,
        place_ptr,
        FP64: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < columns
        x = tl.load(logits_ptr + row * logits_stride + token, mask=inside, other=float("-inf"))
        if FP64:
            x = x.to(tl.float64)
        if tl.load(temperature_ptr + row) != 0.0:
            key = tl.randint(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            if FP64:
                low, high, _, _ = tl.randint4x(key, token)
                low = low.to(tl.uint32, bitcast=True).to(tl.float64)
                high = high.to(tl.uint32, bitcast=True).to(tl.float64)
                uniform = high * (1.0 / 4294967296.0) + low * (1.0 / 18446744073709551616.0)
                uniform = tl.maximum(uniform, 2.2250738585072014e-308)
                x += -tl.log(-tl.log(uniform))
            else:
                uniform = tl.maximum(tl.rand(key, token), 4.6566127342e-10)
                # log1p(-u), corrected for what the subtraction rounds away.
                rest = 1.0 - uniform
                moved = rest - 1.0
                right = tl.log(rest) * (-uniform / tl.where(moved == 0.0, 1.0, moved))
                x += -tl.log(-tl.where(moved == 0.0, -uniform, right))
        best, place = tl.max(x, axis=0, return_indices=True)
        out = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(best_ptr + out, best)
        tl.store(place_ptr + out, tl.program_id(1) * BLOCK + place)

    @triton.jit
    def _token_values_kernel(
        logits_ptr,
        logits_stride,
        columns,
        ids_ptr,
        width,
        scores_ptr,
        ranks_ptr,
        LOGPROBS: tl.constexpr,
        IDS: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        row_ptr = logits_ptr + row * logits_stride
        lane = tl.arange(0, BLOCK)
        chosen = tl.load(row_ptr + tl.load(ids_ptr + row * width)).to(tl.float32)
        rank = tl.full((), 0, tl.int32)
        largest = tl.full((), float("-inf"), tl.float32)
        for start in range(0, columns, BLOCK):
            inside = start + lane < columns
            x = tl.load(row_ptr + start + lane, mask=inside, other=float("-inf")).to(tl.float32)
            rank += tl.sum((inside & (x >= chosen)).to(tl.int32))
            largest = tl.maximum(largest, tl.max(x))
        tl.store(ranks_ptr + row, rank)
        shift = tl.full((), 0.0, tl.float32)
        if LOGPROBS:
            total = tl.full((), 0.0, tl.float32)
            for start in range(0, columns, BLOCK):
                inside = start + lane < columns
                x = tl.load(row_ptr + start + lane, mask=inside, other=float("-inf"))
                total += tl.sum(tl.where(inside, tl.exp(x.to(tl.float32) - largest), 0.0))
            shift = largest + tl.log(total)
        for start in range(0, width, IDS):
            i = start + tl.arange(0, IDS)
            token = tl.load(ids_ptr + row * width + i, mask=i < width, other=0)
            x = tl.load(row_ptr + token, mask=i < width, other=0.0).to(tl.float32)
            tl.store(scores_ptr + row * width + i, x - shift, mask=i < width)


def apply_penalties(
    logits: Tensor,
    place: Tensor,
    index: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
) -> None:
    """Penalise logits [n, vocab] float32 in place: rows `place`, by rows `index` of the tables.

    place, index: int64 [m]; the penalties: float32 [m]; tables: int32 and bool [rows, vocab].
    """
    grid = (len(place), triton.cdiv(logits.shape[1], COLUMNS))
    _penalties_kernel[grid](
        *(logits, logits.stride(0), logits.shape[1], place, index),
        *(presence, frequency, repetition, output_counts, prompt_mask),
        BLOCK=COLUMNS,
    )


def gumbel_sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    has_seed: Tensor,
    positions: Tensor,
    generator: torch.Generator,
    use_fp64: bool = False,
) -> Tensor:
    """Sample a token from each row; see vllmx.sample.gumbel.gumbel_sample.

    Rows without a seed take one from `generator`.
    """
    shape, device = seeds.shape, seeds.device
    drawn = torch.randint(
        *(-(2**63), 2**63 - 1, shape), generator=generator, device=device, dtype=torch.int64
    )
    seeds = torch.where(has_seed, seeds, drawn)
    count, columns = logits.shape
    parts = triton.cdiv(columns, COLUMNS)
    dtype = torch.float64 if use_fp64 else torch.float32
    best = torch.empty((count, parts), dtype=dtype, device=device)
    place = torch.empty((count, parts), dtype=torch.int64, device=device)
    _gumbel_kernel[(count, parts)](
        *(logits, logits.stride(0), columns, temperature, seeds, positions, best, place),
        FP64=use_fp64,
        BLOCK=COLUMNS,
    )
    return place.gather(1, best.argmax(dim=1, keepdim=True)).flatten()


def token_values(logits: Tensor, token_ids: Tensor, logprobs: bool) -> tuple[Tensor, Tensor]:
    """Logits, or with `logprobs` log-probabilities, float32 [n, k], of token_ids int64 [n, k], and
    the rank int32 [n] of each row's first; no table of log-probabilities is made."""
    count, width = token_ids.shape
    scores = torch.empty((count, width), dtype=torch.float32, device=logits.device)
    ranks = torch.empty(count, dtype=torch.int32, device=logits.device)
    if count:
        _token_values_kernel[(count,)](
            *(logits, logits.stride(0), logits.shape[1], token_ids.contiguous(), width),
            *(scores, ranks),
            LOGPROBS=logprobs,
            IDS=min(triton.next_power_of_2(width), COLUMNS),
            BLOCK=WIDE,
            num_warps=8,
        )
    return scores, ranks
