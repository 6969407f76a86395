# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/activation.py @ v0.25.0
"""Activations by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from vllmx.exceptions import CheckpointError
from vllmx.ir.ops.activation_fn import KINDS
from vllmx.ir.select import OpTable
from vllmx.layers.parameter import WeightHolder

GATED = ("silu", "swish", "gelu", "geglu", "gelu_pytorch_tanh", "gelu_new", "swigluoai")
"""Names that a gated MLP may have."""


def get_act_fn(name: str, ops: OpTable) -> Callable[[Tensor], Tensor]:
    """The function of a config's `hidden_act`, x: [..., d] -> [..., d]; "xielu" has weights."""
    name = name.lower().removeprefix("torch.nn.modules.activation.")
    if name == "xielu":
        return XIELU(ops)
    if name not in KINDS:
        raise CheckpointError(
            f"hidden_act {name!r} is not supported; {', '.join(sorted([*KINDS, 'xielu']))} are."
        )
    return partial(ops.bind("activation"), kind=name)


def get_act_and_mul_fn(name: str, ops: OpTable) -> Callable[[Tensor], Tensor]:
    """The function act(x[..., :d]) * x[..., d:] for a config's `hidden_act`."""
    name = name.lower()
    if name in ("silu", "swish"):
        return ops.bind("silu_and_mul")
    if name in ("gelu", "geglu"):
        return ops.bind("gelu_and_mul")
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return partial(ops.bind("gelu_and_mul"), approximate="tanh")
    if name == "swigluoai":
        gates = ops.bind("activation_and_mul")
        return partial(gates, kind="swigluoai", limit=7.0, alpha=1.702, beta=1.0)
    raise CheckpointError(
        f"hidden_act {name!r} is not supported in a gated MLP; {', '.join(GATED)} are."
    )


class XIELU(WeightHolder, nn.Module):
    """Apertus' activation: a parabola above zero, an exponential below, both of learned width."""

    def __init__(self, ops: OpTable) -> None:
        super().__init__()
        self.ops = ops
        self._xielu = ops.bind("xielu")
        self.numbers: dict[str, Tensor] = {}

    def expected_weights(self) -> dict[tuple[str, str | None], tuple[int, ...]]:
        """alpha_p and alpha_n, [1], and the numbers beside them that a checkpoint stores."""
        names: dict[tuple[str, str | None], tuple[int, ...]] = {
            (name, None): (1,) for name in ("alpha_p", "alpha_n")
        }
        return names | {(name, None): () for name in ("beta", "eps")}

    def finish_loading(self) -> None:
        """Keep the two in the activation dtype, as upstream does, and the others as numbers."""
        self.numbers = {
            name: self.take_float(name).to(self.ops.device, self.ops.dtype)
            for name in ("alpha_p", "alpha_n")
        }
        self.beta, self.eps = (float(self.take_float(name)) for name in ("beta", "eps"))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d] -> [..., d]."""
        return self._xielu(x, **self.numbers, beta=self.beta, eps=self.eps)
