# SPDX-License-Identifier: Apache-2.0
# upstream: vllm/model_executor/layers/activation.py @ v0.25.0
"""Gated activations by the names that configs use."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from vllmx.exceptions import CheckpointError
from vllmx.ir.select import OpTable


def get_act_and_mul_fn(name: str, ops: OpTable) -> Callable[[Tensor], Tensor]:
    """The function act(x[..., :d]) * x[..., d:] for a config's `hidden_act`."""
    if name in ("silu", "swish"):
        return ops.bind("silu_and_mul")
    if name == "gelu":
        return ops.bind("gelu_and_mul")
    if name in ("gelu_pytorch_tanh", "gelu_new"):
        return partial(ops.bind("gelu_and_mul"), approximate="tanh")
    raise CheckpointError(
        f"hidden_act {name!r} is not supported; silu, gelu and gelu_pytorch_tanh are."
    )
