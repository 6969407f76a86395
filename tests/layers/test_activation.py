# SPDX-License-Identifier: Apache-2.0
"""Activations by the names of configs; their values are held by goldens."""

import pytest
import torch

from vllmx.config import KernelConfig
from vllmx.exceptions import CheckpointError
from vllmx.ir.ops.activation_fn import KINDS
from vllmx.ir.select import OpTable
from vllmx.layers.activation import GATED, XIELU, get_act_and_mul_fn, get_act_fn
from vllmx.layers.layernorm import LayerNorm

UPSTREAM = ["gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2"]
UPSTREAM += ["sigmoid", "silu", "swish", "tanh"]


@pytest.fixture
def ops() -> OpTable:
    return OpTable(KernelConfig(), "cpu", torch.float32)


def test_every_name_of_upstream_is_known() -> None:
    assert sorted(KINDS) == UPSTREAM


@pytest.mark.parametrize("name", UPSTREAM)
def test_the_name_is_found_in_any_case_and_as_torch_spells_it(ops, name) -> None:
    x = torch.linspace(-3, 3, 12).view(2, 6)
    want = KINDS[name](x)
    assert torch.equal(get_act_fn(name, ops)(x), want)
    assert torch.equal(get_act_fn(name.upper(), ops)(x), want)
    assert torch.equal(get_act_fn(f"torch.nn.modules.activation.{name}", ops)(x), want)


@pytest.mark.parametrize("name", GATED)
def test_a_gate_halves_the_width(ops, name) -> None:
    assert get_act_and_mul_fn(name, ops)(torch.randn(3, 8)).shape == (3, 4)


@pytest.mark.parametrize("find", [get_act_fn, get_act_and_mul_fn])
def test_an_unknown_name_is_refused_with_those_there_are(ops, find) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_act 'swoosh' is not supported.*silu"):
        find("swoosh", ops)


def test_xielu_takes_its_weights_from_the_checkpoint(ops) -> None:
    layer = get_act_fn("xielu", ops)
    assert isinstance(layer, XIELU)
    layer.loaded = {
        ("alpha_p", None): torch.tensor([0.3]),
        ("alpha_n", None): torch.tensor([-0.2]),
        ("beta", None): torch.tensor(0.5),
        ("eps", None): torch.tensor(-1e-6),
    }
    layer.finish_loading()
    x = torch.tensor([2.0, -2.0])
    up = torch.nn.functional.softplus(torch.tensor(0.3))
    down = 0.5 + torch.nn.functional.softplus(torch.tensor(-0.2))
    want = torch.stack((up * 4 + 1.0, (torch.exp(torch.tensor(-2.0)) - 1 + 2) * down - 1.0))
    torch.testing.assert_close(layer(x), want)


def test_a_norm_that_is_stored_less_one_adds_it_and_sums_a_residual(ops) -> None:
    norm = LayerNorm(4, 1e-5, ops, less_one=True)
    norm.loaded = {("weight", None): torch.zeros(4), ("bias", None): torch.full((4,), 2.0)}
    norm.finish_loading()
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    out, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(out, torch.nn.functional.layer_norm(total, (4,)) + 2.0)


def test_a_norm_without_parameters_wants_none_of_the_checkpoint(ops) -> None:
    norm = LayerNorm(4, 1e-5, ops, has_weight=False, has_bias=False)
    assert norm.is_loaded and not norm.expected_weights()
