# SPDX-License-Identifier: Apache-2.0
"""Triton's experts and routers in its interpreter: against goldens, and in every shape of tile."""

import pytest
import torch
from interpreter import multiply_row_by_row

from parity.op_cells import OpCell
from parity.op_replay import Lane
from parity.op_table import OPS
from vllmx.ir.select import load_ops
from vllmx.platform import has

pytestmark = pytest.mark.skipif(not has("triton"), reason="the package triton is not installed")

ROUTED = ("topk_softmax", "grouped_topk")
CASES = [(op, case.name) for op in (*ROUTED, "fused_experts") for case in OPS[op].cases]
EXPERTS = load_ops()["fused_experts"]


@pytest.fixture(scope="module")
def lane() -> Lane:
    return Lane()


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(("op", "case"), [c for c in CASES if "groups" not in c[1]])
def test_goldens_hold_what_the_interpreter_computes(lane: Lane, op, case, dtype) -> None:
    row = lane.row(OpCell(op, case, dtype, "triton", "cpu"))
    assert row["verdict"] == "pass", row["reason"]
    assert row["proof"]["calls"] >= 1


def test_groups_of_experts_are_left_to_the_definition() -> None:
    from vllmx.ir.op import OpContext

    impl = load_ops()["grouped_topk"].impls["triton"]
    refusal = impl.refusal(OpContext("cuda", torch.float32, {"num_expert_group": 4}))
    assert "there are 4" in refusal
    assert impl.refusal(OpContext("cuda", torch.float32, {"num_expert_group": 1})) is None


def inputs(
    tokens: int, experts: int, topk: int, hidden: int, inner: int, skew: float = 0.0
) -> dict:
    generator = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, experts, generator=generator)
    logits[:, 0] += skew
    weights, ids = logits.softmax(-1).topk(topk)
    return {
        "hidden_states": torch.randn(tokens, hidden, generator=generator),
        "w13_weight": torch.randn(experts, 2 * inner, hidden, generator=generator) / hidden**0.5,
        "w2_weight": torch.randn(experts, hidden, inner, generator=generator) / inner**0.5,
        "topk_weights": weights,
        "topk_ids": ids.to(torch.int32),
    }


@pytest.mark.parametrize(
    "shape",
    [
        (1, 8, 2, 64, 32),  # one token
        (7, 3, 3, 40, 24),  # every expert, ragged rows and columns
        (70, 4, 1, 32, 80),  # tiles of 32 slots, more outputs than one tile has
        (150, 2, 1, 33, 16),  # tiles of 64 slots, odd width
        (300, 5, 2, 16, 16),  # slots in more than one block of the sort's
    ],
    ids=str,
)
def test_every_shape_of_tile_agrees_with_the_definition(shape) -> None:
    given = inputs(*shape)
    got = EXPERTS.impls["triton"].fn(**given)
    torch.testing.assert_close(got, EXPERTS.fn(**given), atol=1e-5, rtol=1e-5)


def test_all_tokens_at_one_expert_and_none_at_others() -> None:
    given = inputs(60, 6, 1, 32, 16, skew=100.0)
    assert (given["topk_ids"] == 0).all()
    got = EXPERTS.impls["triton"].fn(**given)
    torch.testing.assert_close(got, EXPERTS.fn(**given), atol=1e-5, rtol=1e-5)


def test_no_tokens_and_rows_of_something_wider() -> None:
    given = inputs(5, 4, 2, 32, 16)
    none = {k: v if k.startswith("w") else v[:0] for k, v in given.items()}
    assert EXPERTS.impls["triton"].fn(**none).shape == (0, 32)
    wide = torch.full((5, 96), float("nan"))
    wide[:, 32:64] = given["hidden_states"]
    got = EXPERTS.impls["triton"].fn(**{**given, "hidden_states": wide[:, 32:64]})
    torch.testing.assert_close(got, EXPERTS.fn(**given), atol=1e-5, rtol=1e-5)


def test_with_fixed_tiles_a_row_alone_has_the_bits_that_it_has_in_a_batch(monkeypatch) -> None:
    multiply_row_by_row(monkeypatch)
    fn = EXPERTS.impls["triton"].invariant_fn
    given = inputs(40, 4, 2, 64, 32)
    whole = fn(**given)
    torch.testing.assert_close(whole, EXPERTS.fn(**given), atol=1e-5, rtol=1e-5)
    for token in (0, 7, 39):
        row = {k: v if k.startswith("w") else v[token : token + 1] for k, v in given.items()}
        assert torch.equal(fn(**row)[0], whole[token])


@pytest.mark.parametrize("experts", [3, 60, 130])
def test_of_equal_scores_the_first_expert_is_taken(experts: int) -> None:
    weights, ids = load_ops()["topk_softmax"].impls["triton"].fn(torch.zeros(4, experts), 3, True)
    assert ids.tolist() == [[0, 1, 2]] * 4
    torch.testing.assert_close(weights, torch.full((4, 3), 1 / 3))
