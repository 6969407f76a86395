# SPDX-License-Identifier: Apache-2.0
"""A cache of one byte a number with scales: every provider that takes it, against float64."""

import copy

import numpy as np
import pytest
import torch

from oracles import truth64_ops as truth64
from vllmx.ir.op import REFERENCE, IrOp, IrOpImpl, OpContext
from vllmx.ir.select import load_ops

OPS = load_ops()
NAMES = ("reshape_and_cache", "paged_attention", "qk_norm_rope_cache", "qk_norm_rope_decode")
PAIRS = [(OPS[name], impl) for name in NAMES for impl in OPS[name].impls.values()]
TYPES = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}
"""Types of a cache, with how far rounding goes, relative to the number."""
TORCH = {
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
SCALES = {"k_scale": 0.037, "v_scale": 2.3}


@pytest.fixture(autouse=True)
def rounding_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter loses the carry when it rounds to one byte; a GPU, and torch, do not."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if not {str(source), str(target)} & {"fp8e4nv", "fp8e5"}:
            return convert(data, source, target, mode)
        bits = torch.from_numpy(np.ascontiguousarray(data))
        values = bits.view(TORCH[str(source)]).to(TORCH[str(target)])
        # numpy has no floats of one byte, nor bfloat16.
        word = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[values.element_size()]
        return values.view(word).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def accepts(op: IrOp, impl: IrOpImpl, inputs: dict, stored: torch.dtype) -> bool:
    device = "cuda" if impl.provider == "triton" else "cpu"
    facts = {**op.facts_of(**inputs), "kv_cache_dtype": stored}
    return impl.refusal(OpContext(device, torch.float32, facts)) is None


def inputs_of(op: IrOp, case: int, stored: torch.dtype) -> dict:
    inputs = op.generate_inputs(case, torch.float32, "cpu", torch.Generator().manual_seed(case))
    for name in ("key_cache", "value_cache"):
        inputs[name] = inputs[name].to(stored)
    return {**inputs, **SCALES}


def meaning(inputs: dict) -> dict:
    """The arguments of the op's truth: both caches as the numbers that they stand for."""
    wide = {}
    for name, value in inputs.items():
        if isinstance(value, torch.Tensor):
            value = value.double().numpy() if value.is_floating_point() else value.numpy()
        wide[name] = value
    wide["key_cache"] = wide["key_cache"] * wide.pop("k_scale")
    wide["value_cache"] = wide["value_cache"] * wide.pop("v_scale")
    return wide


def takers(stored: torch.dtype) -> list[str]:
    return [
        f"{op.name}-{impl.provider}"
        for op, impl in PAIRS
        if accepts(op, impl, inputs_of(op, 0, stored), stored)
    ]


def test_who_takes_such_a_cache() -> None:
    for stored in TYPES:
        assert takers(stored) == [
            *("reshape_and_cache-torch", "reshape_and_cache-triton"),
            *("paged_attention-torch", "paged_attention-sdpa", "paged_attention-triton"),
            *("qk_norm_rope_cache-torch", "qk_norm_rope_cache-triton"),
            *("qk_norm_rope_decode-torch", "qk_norm_rope_decode-triton"),
        ]


@pytest.mark.parametrize("stored", TYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: f"{p[0].name}-{p[1].provider}")
def test_scaled_cache_against_the_truth(pair: tuple[IrOp, IrOpImpl], stored: torch.dtype) -> None:
    op, impl = pair
    tried = 0
    for case in range(7):
        inputs = inputs_of(op, case, stored)
        if not accepts(op, impl, inputs, stored):
            continue
        tried += 1
        given = copy.deepcopy(inputs)
        out = impl.fn(**inputs)
        truth = truth64.TRUTH[op.name](**meaning(given))
        if "slot_mapping" in inputs:
            # Rounded to the nearest number that the cache has: within half of its spacing.
            for name, scale in (("key_cache", "k_scale"), ("value_cache", "v_scale")):
                got = inputs[name].double().numpy() * SCALES[scale]
                least = torch.finfo(stored).smallest_normal * SCALES[scale]
                bound = TYPES[stored] * np.maximum(abs(truth[name]), least) * (1 + 1e-5)
                assert (abs(got - truth[name]) <= bound).all()
        if op.name == "qk_norm_rope_decode":
            # What it attends to is rounded: take the caches as it left them.
            nowhere = torch.full_like(inputs["slot_mapping"], -1)
            truth = truth64.TRUTH[op.name](**meaning({**inputs, "slot_mapping": nowhere}))
        want = truth.get("out", truth.get("query"))
        if want is not None:
            np.testing.assert_allclose(out.double().numpy(), want, atol=2e-5, rtol=2e-5)
    refuses = impl.provider in ("cpu", "native", "flashinfer")
    assert bool(tried) != refuses


@pytest.mark.parametrize("stored", TYPES, ids=str)
def test_the_kernels_store_the_bytes_of_the_definition(stored: torch.dtype) -> None:
    """Also at the ends of the range: beyond it is the largest number, and no infinity."""
    op = OPS["reshape_and_cache"]
    inputs = inputs_of(op, 1, stored)
    inputs["key"][1, 0, :4] = torch.tensor([1e30, -1e30, 0.0, 1e-9])
    inputs["value"][1, 0, :4] = torch.tensor([torch.finfo(stored).max * 2.3, -1e9, 5e-3, -0.0])
    want = copy.deepcopy(inputs)
    op.impls[REFERENCE].fn(**want)
    op.impls["triton"].fn(**inputs)
    for name in ("key_cache", "value_cache"):
        bits = want[name].view(torch.uint8)
        assert torch.equal(inputs[name].view(torch.uint8), bits)
        assert torch.isfinite(want[name].float()).all() and bits.any()


def test_scales_of_1_change_no_bit() -> None:
    for op, impl in PAIRS:
        inputs = inputs_of(op, 2, torch.float8_e4m3fn)
        if not accepts(op, impl, inputs, torch.float8_e4m3fn):
            continue
        plain = copy.deepcopy({k: v for k, v in inputs.items() if k not in SCALES})
        ones = copy.deepcopy({**inputs, "k_scale": 1.0, "v_scale": 1.0})
        first, second = impl.fn(**plain), impl.fn(**ones)
        for a, b in ((first, second), (plain["key_cache"], ones["key_cache"])):
            if a is not None:
                assert a.dtype == b.dtype and torch.equal(a.float(), b.float()), (op.name, impl)
