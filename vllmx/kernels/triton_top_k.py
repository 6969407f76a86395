# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/v1/sample/ops/topk_topp_triton.py @ v0.25.0
"""Top-k and top-p without sorting: thresholds in the order of float32, found four bits at a time.

The parts of all rows are spread over programs, which meet after each pass. What is not below one of
15 candidates is added up as whole numbers, so that a row's sums depend neither on its batch nor on
who comes first. One launch, as that of a kernel takes the host longer than a pass the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vllmx.kernels.triton_attention import processors_of
from vllmx.platform import has

if TYPE_CHECKING or has("triton"):
    import triton
    import triton.language as tl

    SUPPORTED: bool | str = True
else:
    SUPPORTED = "the package triton is not installed"

COLUMNS = 4096
"""Logits that a program looks at at once."""
PROGRAMS = 2
"""For each processor: they wait for each other, so all must run at once."""
PASSES = 8
"""Of four bits each."""
STEPS = 2 * PASSES + 3
"""Passes for k; the largest logit of a row; what k keeps, in all; passes for p; the tokens go."""
LINE = 16
"""Whole numbers of a line of the cache. A pass writes lines that none before it has read."""
PLACES = LINE * (2 * PASSES + 2)
"""Whole numbers of a row: sums of each pass for k and for p, the largest logit, the whole mass."""


if SUPPORTED is True:
    N = tl.constexpr(PASSES)
    P_SUMS = tl.constexpr(LINE * PASSES)
    LARGEST = tl.constexpr(2 * LINE * PASSES)
    TOTAL = tl.constexpr(2 * LINE * PASSES + LINE)
    ONE = tl.constexpr(2.0**36)
    """exp(0) as a whole number: 2**18 of them are no more than 2**54."""

    @triton.jit
    def _ordered(x):
        """float32 as uint32 of the same order; that of -inf is above 0."""
        bits = x.to(tl.int32, bitcast=True)
        flipped = bits ^ ((bits >> 31) | -2147483648)
        return flipped.to(tl.uint32, bitcast=True)

    @triton.jit
    def _number(ordered):
        """The float32 that `_ordered` made `ordered` of."""
        bits = ordered.to(tl.int32, bitcast=True)
        flipped = tl.where(bits < 0, bits ^ -2147483648, ~bits)
        return flipped.to(tl.float32, bitcast=True)

    @triton.jit
    def _found(sums_ptr, wanted, passes):
        """What the first `passes` passes have found: the largest uint32, in that many digits, with
        `wanted` or more not below it; 0 where all are wanted, which is -1."""
        digit = tl.arange(0, 16)
        threshold = tl.full((), 0, tl.uint32)
        for i in range(passes):
            enough = (tl.load(sums_ptr + 16 * i + digit) >= wanted) | (digit == 0)
            threshold += tl.max(tl.where(enough, digit, 0)).to(tl.uint32) << (28 - 4 * i)
        return tl.where(wanted < 0, tl.full((), 0, tl.uint32), threshold)

    @triton.jit
    def _wanted_of_k(top_k_ptr, row, columns):
        """How many to keep; -1: all."""
        k = tl.load(top_k_ptr + row).to(tl.int64)
        return tl.where(k < columns, k, -1)

    @triton.jit
    def _wanted_of_p(top_p_ptr, row, row_sums):
        """How much to keep of what k keeps; -1: all."""
        p = tl.load(top_p_ptr + row).to(tl.float64)
        total = tl.load(row_sums + TOTAL).to(tl.float64)
        return tl.where(p < 1.0, p * total, -1.0).to(tl.int64)

    @triton.jit
    def _kept_by_k(top_k_ptr, row, columns, row_sums, HAS_K: tl.constexpr):
        """The threshold of k, 0 where all are kept."""
        if HAS_K:
            return _found(row_sums, _wanted_of_k(top_k_ptr, row, columns), N)
        return tl.full((), 0, tl.uint32)

    @triton.jit
    def _mass(x, kept, row_sums):
        """exp(x - the row's largest) of those that are kept."""
        largest = _number(tl.load(row_sums + LARGEST).to(tl.uint32))
        return tl.where(kept, tl.exp(x - largest), 0.0)

    @triton.jit
    def _sum(value, kept, IS_MASS: tl.constexpr):
        """Of the values that are kept, as a whole number."""
        found = tl.sum(tl.where(kept, value, 0), axis=0)
        if IS_MASS:
            found = found * ONE
        return found.to(tl.int64)

    @triton.jit
    def _pass(ordered, value, sums_ptr, wanted, done, IS_MASS: tl.constexpr):
        """Add a part of a row to the sums of pass `done`."""
        first = _found(sums_ptr, wanted, done)
        shift = tl.full((), 28, tl.uint32) - (4 * done)
        one = tl.full((), 1, tl.uint32) << shift
        last = first + one * 15 + (one - 1)
        digit = tl.arange(0, 16)
        above = _sum(value, ordered > last, IS_MASS)
        sums = tl.zeros([16], tl.int64) + above
        between = (ordered >= first) & (ordered <= last)
        if tl.max(between.to(tl.int32), axis=0) > 0:
            for d in tl.static_range(1, 16):
                found = _sum(value, ordered >= first + one * d, IS_MASS)
                sums = tl.where(digit == d, found, sums)
        tl.atomic_add(sums_ptr + 16 * done + digit, sums, mask=(sums != 0) & (digit > 0))

    @triton.jit
    def _step(
        step,
        x_ptr,
        inside,
        row,
        columns,
        top_k_ptr,
        top_p_ptr,
        row_sums,
        HAS_K: tl.constexpr,
        HAS_P: tl.constexpr,
    ):
        """What a step does with a part of a row."""
        LAST: tl.constexpr = 2 * N + 2 if HAS_P else N
        x = tl.load(x_ptr, mask=inside, other=float("-inf"))
        ordered = _ordered(x)
        if step < N:
            if HAS_K:
                wanted = _wanted_of_k(top_k_ptr, row, columns)
                if wanted >= 0:
                    _pass(ordered, inside.to(tl.int32), row_sums, wanted, step, False)
        elif step == LAST:
            threshold = _kept_by_k(top_k_ptr, row, columns, row_sums, HAS_K)
            if HAS_P:
                of_p = _found(row_sums + P_SUMS, _wanted_of_p(top_p_ptr, row, row_sums), N)
                # Whatever p is, the likeliest stays; what k drops does not come back.
                of_p = tl.minimum(of_p, tl.load(row_sums + LARGEST).to(tl.uint32))
                threshold = tl.maximum(threshold, of_p)
            drop = inside & (ordered < threshold)
            tl.store(x_ptr, tl.where(drop, float("-inf"), x), mask=drop)
        elif HAS_P:
            if step == N:
                tl.atomic_max(row_sums + LARGEST, _ordered(tl.max(x, axis=0)).to(tl.int64))
            else:
                floor = _kept_by_k(top_k_ptr, row, columns, row_sums, HAS_K)
                kept = inside & (ordered >= floor)
                mass = _mass(x, kept, row_sums)
                if step == N + 1:
                    tl.atomic_add(row_sums + TOTAL, _sum(mass, kept, True))
                else:
                    wanted = _wanted_of_p(top_p_ptr, row, row_sums)
                    if wanted >= 0:
                        _pass(ordered, mass, row_sums + P_SUMS, wanted, step - (N + 2), True)

    @triton.jit(do_not_specialize=["first_step", "last_step"])
    def _top_k_top_p_kernel(
        logits_ptr,
        stride,
        num_rows,
        columns,
        top_k_ptr,
        top_p_ptr,
        sums_ptr,
        arrived_ptr,
        first_step,
        last_step,
        HAS_K: tl.constexpr,
        HAS_P: tl.constexpr,
        PLACES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        parts = tl.cdiv(columns, BLOCK)
        programs = tl.num_programs(0)
        for step in range(first_step, last_step):
            for tile in range(tl.program_id(0), num_rows * parts, programs):
                row = (tile // parts).to(tl.int64)
                i = (tile % parts) * BLOCK + tl.arange(0, BLOCK)
                _step(
                    step,
                    logits_ptr + row * stride + i,
                    i < columns,
                    row,
                    columns,
                    top_k_ptr,
                    top_p_ptr,
                    sums_ptr + row * PLACES,
                    HAS_K,
                    HAS_P,
                )
            if step + 1 < last_step:
                tl.debug_barrier()
                awaited = (step + 1 - first_step) * programs
                arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel") + 1
                while arrived < awaited:
                    arrived = tl.atomic_add(arrived_ptr, 0, sem="acquire")
                tl.debug_barrier()


def apply_top_k_top_p(logits: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Set to -inf, in place, what vllmx.sample.topk_topp.apply_top_k_top_p does.

    logits: float32 [n, vocab]; top_k: int [n]; top_p: float32 [n]. Tokens that tie with the last
    one kept stay, all of them.
    """
    if (top_k is None and top_p is None) or not len(logits):
        return logits
    count, columns = logits.shape
    device = logits.device
    # Behind the sums a line in which programs are counted as they arrive.
    sums = torch.zeros(count * PLACES + LINE, dtype=torch.int64, device=device)
    programs = min(count * triton.cdiv(columns, COLUMNS), PROGRAMS * processors_of(device))
    steps = range(0 if top_k is not None else PASSES, STEPS if top_p is not None else PASSES + 1)
    launches: list[range] = [steps]
    together: dict[str, Any] = {"launch_cooperative_grid": True}
    if device.type == "cpu":  # the interpreter has one program run after the other
        launches, together = [range(step, step + 1) for step in steps], {}
    for launch in launches:
        _top_k_top_p_kernel[(programs,)](
            *(logits, logits.stride(0), count, columns, top_k, top_p),
            *(sums, sums[count * PLACES :], launch.start, launch.stop),
            HAS_K=top_k is not None,
            HAS_P=top_p is not None,
            PLACES=PLACES,
            BLOCK=COLUMNS,
            num_warps=8,
            **together,
        )
    return logits
