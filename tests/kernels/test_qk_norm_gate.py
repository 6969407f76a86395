# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel of norm, rotation and gate, interpreted with a GPU's arithmetic: upstream's
goldens, heads of any size, slices, and calls that it refuses."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from parity.gpu_arithmetic import as_on_a_gpu
from parity.op_cells import OpCell, expected
from parity.op_replay import Lane
from vllmx.ir.op import OpContext
from vllmx.ir.select import load_ops
from vllmx.platform import has

pytestmark = pytest.mark.skipif(not has("triton"), reason="the package triton is not installed")

OP = load_ops()["fused_qk_rmsnorm_rope_gate"]
TRITON = OP.impls["triton"]
CELLS = [
    replace(cell, device="cpu") for cell in expected("cuda", f"op.{OP.name}/", TRITON.provider)
]


@pytest.fixture(autouse=True)
def gpu_arithmetic() -> Iterator[None]:
    with as_on_a_gpu():
        yield


@pytest.fixture(scope="module")
def lane() -> Lane:
    lane = Lane()
    lane.prepare(CELLS)
    return lane


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.case_name)
def test_upstreams_goldens(lane: Lane, cell: OpCell) -> None:
    row = lane.row(cell)
    assert row["verdict"] == "pass", row["reason"]
    assert row["proof"]["calls"] >= 1


def drawn(
    tokens: int, heads: int, kv_heads: int, head_size: int, rotary_dim: int
) -> dict[str, object]:
    """Queries with their gates and keys as slices of one projection that holds values too."""
    generator = torch.Generator().manual_seed(head_size)
    size = kv_heads * head_size
    qkv = torch.randn(tokens, 2 * heads * head_size + 2 * size, generator=generator)
    q_gate, k, _ = qkv.split((2 * heads * head_size, size, size), dim=-1)
    weights = 1 + 0.3 * torch.randn(2, head_size, generator=generator)
    return {
        "q_gate": q_gate,
        "k": k,
        "q_weight": weights[0],
        "k_weight": weights[1],
        "cos_sin_cache": torch.randn(50, rotary_dim, generator=generator),
        "positions": torch.arange(tokens).flip(0) * 3,
        "epsilon": 1e-6,
    }


@pytest.mark.parametrize(
    ("head_size", "rotary_dim"), [(2, 2), (6, 4), (48, 2), (80, 20), (130, 130), (256, 64)]
)
def test_heads_of_any_size_and_any_part_of_them(head_size: int, rotary_dim: int) -> None:
    given = drawn(3, 4, 2, head_size, rotary_dim)
    for got, want in zip(TRITON.fn(**given), OP.fn(**given), strict=True):
        assert got.is_contiguous() and want.is_contiguous()
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("provider", OP.impls)
@pytest.mark.parametrize("heads", [(1, 1), (5, 1)], ids=str)
def test_results_share_no_memory_with_the_projection(provider: str, heads: tuple[int, int]) -> None:
    given = drawn(2, *heads, 32, 8)
    whole = given["q_gate"].untyped_storage().data_ptr()
    for part in OP.impls[provider].fn(**given):
        assert part.is_contiguous() and part.untyped_storage().data_ptr() != whole


def test_a_step_without_tokens() -> None:
    parts = TRITON.fn(**drawn(0, 4, 2, 64, 16))
    assert [tuple(part.shape) for part in parts] == [(0, 256), (0, 128), (0, 256)]


def test_calls_that_it_refuses_are_told_why() -> None:
    def refusal(device: str, head_size: int) -> str | None:
        return TRITON.refusal(OpContext(device, torch.bfloat16, {"head_size": head_size}))

    assert refusal("cuda", 80) is None
    assert refusal("cuda", 10000) == "holds at most 8192 elements of a head, not 10000"
    assert refusal("cpu", 64) == "runs on a GPU, not on cpu"
