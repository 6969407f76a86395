# SPDX-License-Identifier: Apache-2.0
"""Dequantisation equals gguf's own, bit for bit."""

import gguf
import numpy as np
import pytest
import torch

from vllmx.exceptions import CheckpointError
from vllmx.ir import gguf_dequant
from vllmx.ir.ggml import BLOCK_SIZES, GGMLType
from vllmx.ir.gguf_dequant import PLAIN_DTYPES, check_supported, dequantize

TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()


def random_blocks(kind: GGMLType, rows: int, blocks: int) -> np.ndarray:
    """Any bytes, but with finite scales: NaN has many bit patterns."""
    draw = np.random.default_rng(int(kind) + rows)
    size = BLOCK_SIZES[kind][1]
    data = draw.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind.name, (0, 2))
    if kind.name in ("Q4_0", "Q5_0", "Q8_0"):
        halves = (0,)
    if kind not in PLAIN_DTYPES:
        for at in halves:
            data[..., at + 1] &= 0xBF  # clears an exponent bit: below 2
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (17, 5)])
def test_values_equal_ggufs(name, rows, blocks) -> None:
    kind = GGMLType[name]
    data = random_blocks(kind, rows, blocks if kind not in PLAIN_DTYPES else 63)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    values = dequantize(torch.from_numpy(data), kind)
    assert values.dtype == torch.float32
    np.testing.assert_array_equal(values.numpy(), np.asarray(expected, np.float32))


@pytest.mark.parametrize("name", TYPES[3:])
def test_large_tensor_is_expanded_in_chunks_with_equal_values(name, monkeypatch) -> None:
    kind = GGMLType[name]
    data = torch.from_numpy(random_blocks(kind, 9, 4))
    whole = dequantize(data, kind)
    monkeypatch.setattr(gguf_dequant, "CHUNK_ELEMENTS", 5 * BLOCK_SIZES[kind][0])
    assert torch.equal(dequantize(data, kind), whole)
    assert torch.equal(dequantize(data, kind, torch.bfloat16), whole.to(torch.bfloat16))


def test_quantised_floats_come_back_within_the_type_s_error() -> None:
    values = np.random.default_rng(0).standard_normal((16, 256)).astype(np.float32)
    for name, bound in (("Q8_0", 0.02), ("Q5_1", 0.12), ("Q4_1", 0.25), ("BF16", 0.02)):
        packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        back = dequantize(torch.from_numpy(packed), GGMLType[name])
        assert (back - torch.from_numpy(values)).abs().max() < bound


def test_bf16_equals_torch_s_cast() -> None:
    values = torch.randn(5, 33, generator=torch.Generator().manual_seed(0))
    stored = values.to(torch.bfloat16)
    back = dequantize(stored.view(torch.uint8), GGMLType.BF16, torch.bfloat16)
    assert torch.equal(back, stored)


@pytest.mark.parametrize("name", ["IQ2_XXS", "MXFP4", "TQ1_0", "Q8_K"])
def test_unsupported_type_is_refused_by_name(name) -> None:
    with pytest.raises(CheckpointError, match=f"'x' is stored as {name}.*supported: F32, F16"):
        check_supported(GGMLType[name], "x")
