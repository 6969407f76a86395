# SPDX-License-Identifier: Apache-2.0
"""Slopes of the scores (ALiBi): a key counts for less the further it is, for each head its way."""

from __future__ import annotations

import pytest
import torch
from alone_and_together import assert_alone_as_together

from vllmx.config import KernelConfig, RunConfig, finalize
from vllmx.exceptions import UserError
from vllmx.ir.ops.attention import WITH_SLOPES
from vllmx.ir.select import OpTable, load_ops
from vllmx.layers.alibi import alibi_slopes
from vllmx.layers.attention import Attention

OPS = load_ops()
PROVIDERS = ["torch", "sdpa"]


def inputs(case: int = WITH_SLOPES) -> dict:
    generator = torch.Generator().manual_seed(case)
    return OPS["paged_attention"].generate_inputs(case, torch.float32, "cpu", generator)


def run(provider: str, given: dict, slopes: torch.Tensor | None) -> torch.Tensor:
    return OPS["paged_attention"].impls[provider].fn(**{**given, "alibi_slopes": slopes})


def test_slopes_of_any_number_of_heads() -> None:
    assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(1) == [2.0**-8]
    assert alibi_slopes(4, 6.0) == pytest.approx([2.0**-1.5, 2.0**-3, 2.0**-4.5, 2.0**-6])
    # Between those of four heads lie those of eight.
    assert alibi_slopes(6) == pytest.approx([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("case", [WITH_SLOPES, 4, 5])
def test_a_flat_slope_changes_nothing_and_a_steep_one_leaves_a_token_itself(provider, case) -> None:
    """Also with a window (4) and a cap (5)."""
    given = inputs(case)
    heads = given["query"].shape[1]
    plain = run(provider, given, None)
    flat = run(provider, given, torch.zeros(heads))
    torch.testing.assert_close(flat, plain, atol=1e-6, rtol=1e-5)
    steep = run(provider, given, torch.full((heads,), 1e4))
    group = heads // given["value_cache"].shape[2]
    starts, lengths = given["query_start_loc"].tolist(), given["seq_lens"].tolist()
    for row, length in enumerate(lengths):
        for place in range(starts[row], starts[row + 1]):
            token = length - (starts[row + 1] - place)
            block = given["block_table"][row, token // given["value_cache"].shape[1]].long()
            own = given["value_cache"][block, token % given["value_cache"].shape[1]]
            torch.testing.assert_close(steep[place], own.repeat_interleave(group, 0))


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_slope_takes_its_head_alone(provider: str) -> None:
    given = inputs()
    slopes = given["alibi_slopes"].clone()
    before = run(provider, given, slopes)
    slopes[2] *= 3.0
    after = run(provider, given, slopes)
    others = [head for head in range(len(slopes)) if head != 2]
    torch.testing.assert_close(after[:, others], before[:, others], atol=0, rtol=0)
    assert not torch.allclose(after[:, 2], before[:, 2], atol=1e-3)


def test_a_token_alone_and_in_a_batch() -> None:
    assert_alone_as_together("torch", inputs())


def test_backends_without_slopes_refuse_by_name() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    assert ops.choose("paged_attention", head_size=64, alibi=True).provider == "sdpa"
    refused = ops.choices["paged_attention"].refused
    assert refused["native"] == "has no slopes of the scores (ALiBi)"
    with pytest.raises(UserError, match=r"attention.backend=native: .*no slopes of the scores"):
        ops.choose_attention("native", head_size=64, alibi=True)


def test_a_layer_hands_its_slopes_to_the_backend() -> None:
    ops = OpTable(KernelConfig(), "cpu", torch.float32)
    layer = Attention(
        *(6, 64, 0.125, 2),
        vllm_config=finalize(RunConfig()),
        ops=ops,
        prefix="model.layers.0.self_attn.attn",
        alibi_slopes=alibi_slopes(6),
    )
    assert layer.backend.name == "sdpa"
    assert layer._run.keywords["alibi_slopes"].tolist() == pytest.approx(alibi_slopes(6))
