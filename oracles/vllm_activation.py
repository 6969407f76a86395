# SPDX-License-Identifier: Apache-2.0
"""Lanes of `vllm_ops`: upstream's other activations, and torch's norm by mean and variance.

Registers with the oracle of oracles/vllm_ops.py.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oracles.op_job import Tensors
from oracles.vllm_ops import LAYERS, ORACLE, _kernels, _layer

ACTIVATION = f"{LAYERS}.activation"
KERNELS = {"gelu_fast": "gelu_fast", "gelu_new": "gelu_new", "quick_gelu": "gelu_quick"}


@ORACLE.lane("activation", "layer-native", f"{ACTIVATION}.get_act_fn")
def activation(x: Tensor, kind: str) -> Tensors:
    """The layer of that name, by its own torch code."""
    from vllm.model_executor.layers.activation import get_act_fn

    layer = _layer(get_act_fn, kind)
    return {"out": getattr(layer, "forward_native", layer)(x)}


@ORACLE.lane("activation", "cpu-kernel", "torch.ops._C")
def activation_kernel(x: Tensor, kind: str) -> Tensors:
    """The compiled kernel, where there is one."""
    if kind not in KERNELS:
        raise ValueError(f"there is no kernel of {kind}")
    out = torch.empty_like(x)
    getattr(_kernels(), KERNELS[kind])(out, x)
    return {"out": out}


@ORACLE.lane("activation_and_mul", "layer-native", f"{ACTIVATION} (the layer of the kind)")
def activation_and_mul(x: Tensor, kind: str, limit: float, alpha: float, beta: float) -> Tensors:
    """The layer of that kind, by its own torch code."""
    from vllm.model_executor.layers import activation as layers

    if kind == "gelu_sparse":
        # The layer is told the share that is cut, of which `alpha` is the quantile.
        share = float(torch.special.ndtr(torch.tensor(alpha, dtype=torch.float64)))
        layer = _layer(layers.GeluAndMulSparse, share, approximate="tanh")
    else:
        made: dict[str, tuple[Any, ...]] = {
            "fatrelu": (layers.FatreluAndMul, limit),
            "mul_and_silu": (layers.MulAndSilu,),
            "silu_clamped": (layers.SiluAndMulWithClamp, limit, alpha, beta),
            "swigluoai": (layers.SwigluOAIAndMul, alpha, limit),
            "swiglustep": (layers.SwigluStepAndMul, limit),
        }
        layer = _layer(*made[kind])
    return {"out": layer.forward_native(x)}


@ORACLE.lane("xielu", "layer-native", f"{ACTIVATION}.XIELU.forward_native")
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, eps: float) -> Tensors:
    """The layer with the given weights."""
    from vllm.model_executor.layers.activation import XIELU

    layer = _layer(XIELU, beta=beta, eps=eps, dtype=x.dtype)
    with torch.no_grad():
        layer.alpha_p.copy_(alpha_p)
        layer.alpha_n.copy_(alpha_n)
        return {"out": layer.forward_native(x)}


@ORACLE.lane("layer_norm", "torch", "torch.nn.functional.layer_norm")
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensors:
    """What upstream's models call: it has no layer of its own for it."""
    return {"out": F.layer_norm(x, x.shape[-1:], weight, bias, epsilon)}
