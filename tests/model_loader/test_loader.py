# SPDX-License-Identifier: Apache-2.0
"""What is loaded when nothing is read, and what expands weights that are blocks."""

import pytest
import torch

from vllmx.ir.ggml import GGMLType
from vllmx.model_loader.loader import _with_chosen_expansion, dummy_weight
from vllmx.model_loader.weights import GGUFTensor

SHAPE = (64, 256)


def test_a_dummy_weight_depends_on_its_name_and_the_seed_alone() -> None:
    first = dummy_weight("a.weight", SHAPE, 0)
    torch.manual_seed(9)
    assert torch.equal(first, dummy_weight("a.weight", SHAPE, 0))
    assert not torch.equal(first, dummy_weight("b.weight", SHAPE, 0))
    assert not torch.equal(first, dummy_weight("a.weight", SHAPE, 1))


@pytest.mark.parametrize("seed", [0, 1])
def test_dummy_weights_keep_activations_as_large_as_they_come(seed: int) -> None:
    """Matrices by 1 / sqrt(fan in), norms near one, biases near zero."""
    matrix = dummy_weight("a.weight", SHAPE, seed)
    assert float(matrix.std()) == pytest.approx(SHAPE[-1] ** -0.5, rel=0.05)
    norm, bias = (dummy_weight(f"a.{name}", (4096,), seed) for name in ("weight", "bias"))
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.01)
    assert float(bias.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(norm.std()) == pytest.approx(0.02, rel=0.1)
    assert matrix.dtype == norm.dtype == torch.float32


def test_blocks_are_expanded_by_the_chosen_provider_of_their_type() -> None:
    class Ops:
        def bind(self, op: str, **static: object) -> object:
            return (op, static)

    blocks = GGUFTensor("a", GGMLType.Q8_0, (1, 32), torch.zeros(1, 34, dtype=torch.uint8))
    plain = torch.ones(1)
    found = dict(_with_chosen_expansion([("a", blocks), ("b", plain)], Ops()))
    assert found["a"].expand == ("dequantize_gguf", {"qtype": "Q8_0"})
    assert found["b"] is plain
